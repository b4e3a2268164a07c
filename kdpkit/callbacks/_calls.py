"""The call that trains: Keras has no hook for training that failed, but a call has ended."""

from types import FrameType

Call = tuple[int, object]  # not the frame itself, which would keep alive all that the call holds


def training_call(frame: FrameType) -> Call:
    """Name the call that trains: the first one outwards that does not only pass a hook on."""
    while frame.f_code.co_name == "on_train_begin" and frame.f_back:
        frame = frame.f_back
    return _identity(frame)


def is_under_way(call: Call, frame: FrameType | None) -> bool:
    """Return whether a frame is the call, or was called from it."""
    while frame and _identity(frame) != call:
        frame = frame.f_back
    return frame is not None


def _identity(frame: FrameType) -> Call:
    return id(frame), frame.f_code
