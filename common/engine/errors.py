"""What can be wrong with a model or an adapter that a node was asked to serve.

ModelError                 ends the start-up
├── ModelNotFoundError     no such folder, and nothing on the hub under that name
├── UnsupportedModelError  readable, but not something this engine computes
├── WeightsError           the weight files do not fit the config
├── DeviceError            not a device, or kernels, that this machine has
└── MemoryPlanError        the device is too small for the model, a batch and some pages

AdapterError               ends one attempt to load one adapter
"""


class ModelError(Exception):
    """Base of everything wrong with a model; the message is for the person who named it."""


class ModelNotFoundError(ModelError):
    """No such folder, and nothing could be fetched under that name."""


class UnsupportedModelError(ModelError):
    """The architecture or one of its settings is not implemented."""


class WeightsError(ModelError):
    """A weight is missing, unexpected or has another shape than the config says."""


class DeviceError(ModelError):
    """What was asked to compute is not there, or cannot compute in the way that was asked for."""


class MemoryPlanError(ModelError):
    """Weights, the largest batch and at least one page do not fit into what may be used."""


class AdapterError(Exception):
    """An adapter is not there, damaged, or ("incompatible: ...") not one that this model can serve
    with; the message is for the person who named it."""
