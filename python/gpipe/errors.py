"""Exceptions of gpipe. What a module raises arrives as it is, with a note of layer, stage and
micro-batch."""


class Error(RuntimeError):
    """Any error of gpipe itself."""


class SettingError(Error, ValueError):
    """A setting or an argument does not fit. Nothing was updated."""


class ModelError(Error, ValueError):
    """Layers do not fit each other, or the example. Nothing was updated."""


class StepError(Error):
    """A step failed. Parameters and optimizer state are as they were before it, except after an
    update that only some stages made, or a forward that changed a parameter: see
    `Pipeline.accept_torn_update`."""


class NotFiniteError(StepError):
    """A loss, a gradient or a value between layers is NaN or infinite. Nothing was updated."""


class OutOfMemoryError(StepError, MemoryError):
    """A stage exceeded its memory cap, or its device has no memory left. Nothing was updated."""


class TimedOutError(StepError):
    """A stage, or all of them, made no progress within the pipeline's timeout."""


class PeerError(StepError):
    """Another process of the pipeline failed, or does not answer."""


class CheckpointError(Error):
    """A checkpoint cannot be written or read, or does not fit the pipeline."""


class VerificationError(Error):
    """Two ways to run a model gave different bits."""
