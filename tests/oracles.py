"""Slow, obvious answers for the tests to compare with: plain Python, no tensors."""

import bisect
import functools
import math

from keras.optimizers.schedules import CosineDecay, PolynomialDecay

from kdpkit import schedules


@functools.singledispatch
def learning_rate(schedule, step):
    """Compute a schedule's rate at an integer step in double precision."""
    raise NotImplementedError(type(schedule))


@learning_rate.register
def _(schedule: float, _step):
    return schedule


@learning_rate.register
def _(schedule: PolynomialDecay, step):
    left = max(schedule.decay_steps - step, 0) / schedule.decay_steps
    end = schedule.end_learning_rate
    return end + (schedule.initial_learning_rate - end) * left**schedule.power


@learning_rate.register
def _(schedule: CosineDecay, step):
    done = min(step, schedule.decay_steps) / schedule.decay_steps
    share = schedule.alpha + (1 - schedule.alpha) * math.cos(math.pi / 2 * done) ** 2
    return schedule.initial_learning_rate * share


@learning_rate.register
def _(schedule: schedules.LinearWarmup, step):
    left = schedule.warmup_steps - step
    if left <= 0:
        return learning_rate(schedule.schedule, -left)
    start = learning_rate(schedule.schedule, 0)
    return (start * step + schedule.initial_learning_rate * left) / schedule.warmup_steps


@learning_rate.register
def _(schedule: schedules.ScaledSchedule, step):
    power = {"none": 0, "sqrt": 1 / 2, "linear": 1}[schedule.rule]
    return schedule.factor**power * learning_rate(schedule.schedule, step)


@learning_rate.register
def _(schedule: schedules.JoinedSchedule, step):
    piece = bisect.bisect_right(schedule.boundaries, step)
    start = [0, *schedule.boundaries][piece]
    return learning_rate(schedule.schedules[piece], step - start)


@learning_rate.register
def _(schedule: schedules.WarmupStableDecay, step):
    peak, end = schedule.peak, schedule.end_learning_rate
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    left = max(schedule.total_steps - step, 0)
    if left >= schedule.decay_steps:
        return peak
    done = 1 - left / schedule.decay_steps
    return {
        "linear": lambda: peak + (end - peak) * done,
        "cosine": lambda: end + (peak - end) * math.cos(math.pi / 2 * done) ** 2,
        "sqrt": lambda: peak + (end - peak) * math.sqrt(done),
    }[schedule.shape]()


@learning_rate.register
def _(schedule: schedules.NoamDecay, step):
    step, warmup = max(step, 1), schedule.warmup_steps
    highest = schedule.scale / math.sqrt(schedule.model_dim * warmup)
    return highest * (step / warmup if step < warmup else math.sqrt(warmup / step))
