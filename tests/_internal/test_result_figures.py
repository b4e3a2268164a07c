import json

import keras
import pytest
from matplotlib import pyplot

from kdpkit import experiment, schedules, strategies


@pytest.fixture
def results():
    """What two epochs of five steps gave, read back as from `--results`."""
    schedule = schedules.warmup_cosine(0.1, total_steps=10, warmup_steps=4)
    rates = schedules.preview(schedule, 10)
    return json.loads(
        json.dumps(
            {
                "history": {
                    "loss": [2.0, 1.0],
                    "val_loss": [3.0, 2.5],
                    "examples_per_second": [100.0, 300.0],
                },
                "learning_rates": [float(rates[4]), float(rates[9])],
                "steps": 10,
                "schedule": keras.saving.serialize_keras_object(schedule),
            }
        )
    )


@pytest.fixture
def figure(results):
    drawn = experiment.plot_results(results)
    yield drawn
    pyplot.close(drawn)


def test_each_panel_shows_what_the_history_holds(figure):
    loss, speed, rate = figure.axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 1.0], [3.0, 2.5]]
    assert [list(line.get_xydata()[:, 1]) for line in speed.lines] == [[100.0, 300.0]]
    assert speed.get_title() == "examples per second"
    assert speed.get_ylim()[0] == 0 < 300 < speed.get_ylim()[1]
    assert rate.get_title() == "learning rate"


def test_applied_rates_lie_on_the_line_of_the_schedule(figure):
    line, dots = figure.axes[2].lines
    curve = dict(line.get_xydata())
    assert list(dots.get_xdata()) == [4.0, 9.0]
    assert [curve[step] for step in dots.get_xdata()] == pytest.approx(list(dots.get_ydata()))


def test_a_plain_rate_and_an_unmeasured_speed_are_drawn_too(results, tmp_path):
    results |= {"schedule": None}
    del results["history"]["examples_per_second"]
    experiment.plot_results(results, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []


def test_what_is_left_out_of_results_is_left_out_of_the_figure(results, tmp_path):
    experiment.plot_results({"history": results["history"]}, tmp_path / "bare.png")
    results["schedule"] = {"class_name": "Mine", "config": {}, "registered_name": "app>Mine"}
    experiment.plot_results(results, tmp_path / "unknown.png")
    assert {file.name for file in tmp_path.iterdir()} == {"bare.png", "unknown.png"}


def test_bad_results_and_a_missing_directory_get_one_sentence(results, tmp_path):
    with pytest.raises(ValueError, match=r"what a recipe returned.*results=\['loss'\]"):
        experiment.plot_results({"loss": [1.0]})
    for wrong in ("results.json", None, {"history": {}}, {"history": [1.0]}):
        with pytest.raises(ValueError, match="what a recipe returned"):
            experiment.plot_results(wrong)
    with pytest.raises(ValueError, match="directory does not exist"):
        experiment.plot_results(results, tmp_path / "none" / "run.png")


@pytest.mark.parametrize("loss_scaling", [False, True])
def test_results_hold_the_schedule_of_the_optimizer(loss_scaling):
    schedule = schedules.NoamDecay(64, 10)
    optimizer = keras.optimizers.Adam(schedule)
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    history = model.fit(keras.ops.ones((4, 1)), keras.ops.ones((4, 1)), verbose=0)

    results = experiment.results_of(
        model, history, strategy=strategies.select_strategy("one"), global_batch_size=4
    )
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(results["schedule"])))
    assert again.get_config() == schedule.get_config()
