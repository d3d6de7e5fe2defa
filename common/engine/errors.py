"""What can be wrong with a model that a node was asked to serve. All of it ends the start-up.

ModelError
├── ModelNotFoundError     no such folder, and nothing on the hub under that name
├── UnsupportedModelError  readable, but not something this engine computes
└── WeightsError           the weight files do not fit the config
"""


class ModelError(Exception):
    """Base of everything wrong with a model; the message is for the person who named it."""


class ModelNotFoundError(ModelError):
    """No such folder, and nothing could be fetched under that name."""


class UnsupportedModelError(ModelError):
    """The architecture or one of its settings is not implemented."""


class WeightsError(ModelError):
    """A weight is missing, unexpected or has another shape than the config says."""
