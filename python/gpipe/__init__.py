"""Pipeline parallelism with re-materialization for any `nn.Sequential`, exact to the bit.

    with gpipe.Pipeline(model, example=x, stages=4, micro_batches=8, loss=nn.CrossEntropyLoss(),
                        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4)) as pipe:
        for x, y in loader:
            report = pipe.train_step(x, y)
    torch.save(model.state_dict(), "model.pt")

- `Pipeline`: a model cut into stages; `sequence`: makes other models sequences
- `verify`: compares a model's training bit for bit between numbers of stages
- `Loss`, `LastAxis`: losses; `skip`: tensors that go past layers
- `plan`, `Profile`, `Plan`: the fastest way to run a model, from measurements
- `load`: the weights of a checkpoint; `Timeline`: of a step; `errors`: exceptions
- `compat`: torchgpipe's interface

Importing it replaces PyTorch's CPU allocator by one that counts memory by stage, and `F.dropout`,
`F.scaled_dot_product_attention` and `torch.utils.checkpoint.checkpoint` by functions that do the
same outside of layers. See the guide "From PyTorch".
"""

from . import _simulated

_simulated.load()

import torch  # noqa: E402 (its libtorch is the one that the native part is linked with)

_simulated.tell(torch)

_BUILT_FOR = "2.11.0"
if torch.__version__.split("+")[0] != _BUILT_FOR:
    raise ImportError(f"gpipe is built for PyTorch {_BUILT_FOR}, this is {torch.__version__}: "
                      f"install torch=={_BUILT_FOR}, or build gpipe for this one")

from . import compat, errors, skip  # noqa: E402
from .checkpoint import load  # noqa: E402
from .errors import Error  # noqa: E402
from .loss import LastAxis, Loss  # noqa: E402
from .pipeline import Pipeline  # noqa: E402
from .planning import Plan, Profile, plan  # noqa: E402
from .report import DeviceReport, Evaluation, StepReport, Timeline  # noqa: E402
from .sequence import Sequence, sequence  # noqa: E402
from .verify import verify  # noqa: E402

__version__ = "0.2.0"
__all__ = ["DeviceReport", "Error", "Evaluation", "LastAxis", "Loss", "Pipeline", "Plan", "Profile",
           "Sequence", "StepReport", "Timeline", "compat", "errors", "load", "plan", "sequence",
           "skip", "verify"]
