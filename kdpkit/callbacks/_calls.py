"""Find the call that trains: Keras has no hook for failed training, but the call has ended."""

from types import FrameType

Call = tuple[int, object]  # not the frame itself, which would keep its variables alive


def training_call(frame: FrameType) -> Call:
    """Return the call that trains: the innermost one that does not only forward a hook."""
    while frame.f_code.co_name == "on_train_begin" and frame.f_back:
        frame = frame.f_back
    return _identity(frame)


def is_under_way(call: Call, frame: FrameType | None) -> bool:
    """Return whether a frame is that call, or was called from it."""
    while frame and _identity(frame) != call:
        frame = frame.f_back
    return frame is not None


def _identity(frame: FrameType) -> Call:
    return id(frame), frame.f_code
