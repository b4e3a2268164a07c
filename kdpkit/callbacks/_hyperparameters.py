"""Hyperparameters as TensorBoard shows them: in its HParams table, and as text."""

import dataclasses
import numbers
import time
from collections.abc import Iterator, Mapping
from typing import Any


def flattened(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return plain values by name; nested ones as `outer.inner`.

    Dataclasses contribute their fields and properties, mappings their items. Other values than
    numbers and strings are converted to strings.

    >>> from kdpkit.scaling import ScalePlan
    >>> plan = ScalePlan(replicas=2, per_replica_batch_size=32, base_learning_rate=1e-4)
    >>> found = flattened({"plan": plan, "layers": (64, 10), "seed": None})
    >>> found["plan.replicas"], found["plan.global_batch_size"], found["layers"], found["seed"]
    (2, 64, '(64, 10)', 'None')
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = _inside(value)
        if inner is None:
            found[str(name)] = _plain(value)
        else:
            found |= {f"{name}.{part}": plain for part, plain in flattened(inner).items()}
    return found


def _inside(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, Mapping):
        return value
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    properties = [name for name, of in vars(type(value)).items() if isinstance(of, property)]
    names = [*(field.name for field in dataclasses.fields(value)), *properties]
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


def as_table(values: Mapping[str, Any]) -> str:
    r"""Return a Markdown table.

    >>> print(as_table({"rule": "linear", "a|b": 0.5}))
    | name | value |
    | --- | --- |
    | rule | linear |
    | a\|b | 0.5 |
    """
    lines = [("name", "value"), ("---", "---"), *values.items()]
    return "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def begin_events(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the events from which TensorBoard reads a run's hyperparameters."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb

    yield _event(hparams_pb(values))
    yield _event(text_pb("hyperparameters", as_table(values)))


def end_event() -> Any:
    """Return the event that marks the run as complete for TensorBoard."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    summary = Summary()
    summary.value.add(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    return _event(summary)


def _event(summary: Any) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), step=0, summary=summary)
