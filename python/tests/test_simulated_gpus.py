"""The zoo on simulated GPUs, in a process of its own: PyTorch looks for GPUs once.

A wait that is missing between streams, devices and the host ends the process with a report.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import test_processes
from zoo import ZOO

from gpipe import _simulated

HERE = Path(__file__).parent
# Their cells are kernels that exist for CUDA alone.
RECURRENT = {"lstm", "lstm_with_dropout", "gru_and_its_state"}

pytestmark = pytest.mark.skipif(not _simulated.LIBRARY.exists(),
                                reason="make python ARGS=--simulated-gpus builds them")


def run(*arguments):
    path = os.pathsep.join([str(HERE), str(HERE.parent / "examples"), *filter(None, sys.path)])
    # In this folder, so that Python finds the installed package and not its sources.
    return subprocess.run([sys.executable, *arguments], text=True, capture_output=True, timeout=300,
                          cwd=HERE,
                          env=dict(os.environ, GPIPE_SIMULATED_GPUS="2", PYTHONPATH=path))


def test_the_zoo_gives_the_same_bits_on_one_gpu_and_on_two():
    names = [name for name in ZOO if name not in RECURRENT]
    ran = run(HERE / "train_on_simulated_gpus.py", *names)
    seen = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [own["name"] for own in seen] == names, ran.stderr
    assert [own for own in seen if own["seen"]] == []
    assert "GPUs are simulated" in ran.stderr


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_processes_that_nccl_connects_have_the_bits_of_one(schedule, tmp_path, monkeypatch):
    monkeypatch.setenv("GPIPE_SIMULATED_GPUS", "2")
    one, = test_processes.run(1, schedule, tmp_path / "one", "cuda:0")
    for own in test_processes.run(2, schedule, tmp_path / "two", "cuda:0", "cuda:1"):
        for key in ("losses", "weights", "evaluation", "restored"):
            assert own[key] == one[key], key


def test_gpus_that_come_too_late_are_refused():
    ran = run("-c", "import torch, gpipe")
    assert ran.returncode and "import gpipe before torch" in ran.stderr


def test_a_gpu_that_is_not_there_is_named():
    script = ("import gpipe\nfrom torch import nn, ones\n"
              "gpipe.Pipeline(nn.Sequential(nn.Linear(2, 2)), ones(4, 2), devices=['cuda:2'])")
    ran = run("-c", script)
    assert ran.returncode and "PyTorch sees 2 GPUs here" in ran.stderr


def test_regression_a_state_that_is_read_is_the_stages():
    """That of a `gpipe.sequence` was the state before the step, and running statistics were those
    before an accumulation."""
    script = """
        import gpipe
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
                self.last = nn.Linear(6, 3)

        def state(devices, accumulates, of_sequence):
            torch.manual_seed(0)
            net = Net()
            parts = gpipe.sequence(net, ["first", "norm", "last"])
            x, y = torch.ones(8, 6).cumsum(0), torch.ones(8, 3)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            pipe = gpipe.Pipeline(parts, x, devices=devices, micro_batches=2, loss=nn.MSELoss(),
                                  optimizer=None if accumulates else optimizer)
            for _ in range(2):
                if accumulates:
                    optimizer.zero_grad()
                    pipe.accumulate(x, y)
                    (parts if of_sequence else net).state_dict()  # read between the two
                    optimizer.step()
                else:
                    pipe.train_step(x, y)
            read = (parts if of_sequence else net).state_dict()
            return {name: value.cpu().clone() for name, value in read.items()}

        for accumulates in (False, True):
            for of_sequence in (False, True):
                wanted = state(["cpu", "cpu"], accumulates, of_sequence)
                found = state(["cuda:0", "cuda:1"], accumulates, of_sequence)
                for name, value in wanted.items():
                    # Kernels of simulated GPUs may add in another order.
                    torch.testing.assert_close(found[name], value, msg=f"{accumulates} {name}")
    """
    ran = run("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


def test_regression_numbers_are_drawn_on_the_gpu_of_the_stage():
    """An operator that is told "cuda" drew with the generator of the first GPU, and was refused on
    the others."""
    script = """
        import gpipe
        import torch
        from torch import nn

        class Noise(nn.Module):
            def forward(self, x):
                return x + torch.normal(0.0, 1.0, tuple(x.shape), device=x.device.type)

        def trained(devices, remat):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3), Noise())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            pipe = gpipe.Pipeline(net, torch.ones(8, 6), devices=devices, micro_batches=2,
                                  loss=nn.MSELoss(), optimizer=optimizer, remat=remat)
            return [pipe.train_step(torch.ones(8, 6), torch.ones(8, 3)).loss for _ in range(3)]

        wanted = trained(["cuda:0"], "never")
        assert trained(["cuda:0", "cuda:1"], "always") == wanted
        assert trained(["cuda:1"], "always") == wanted
    """
    ran = run("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


def test_regression_gradients_are_where_the_module_is():
    """The engine gives them on the CPU, and autograd refused them for a module on a GPU."""
    script = """
        import gpipe
        import torch
        from torch import nn

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        x = torch.ones(8, 6).cumsum(1)
        net(x).sum().backward()
        wanted = [own.grad.clone() for own in net.parameters()]
        net.zero_grad()
        net.to("cuda:0")
        pipe = gpipe.Pipeline(net, x, devices=["cuda:0", "cuda:1"], micro_batches=2)
        pipe(x).sum().backward()
        for own, expected in zip(net.parameters(), wanted):
            assert own.grad.device == own.device
            torch.testing.assert_close(own.grad.cpu(), expected)
    """
    ran = run("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


def test_regression_a_pipeline_that_is_dropped_gives_its_weights_to_the_module():
    """They were lost with it, in silence: the module's state was that before the training."""
    script = """
        import warnings

        import gpipe
        import torch
        from torch import nn

        def trained(devices, accumulates):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
            optimizer = None if accumulates else torch.optim.SGD(net.parameters(), lr=0.1)
            pipe = gpipe.Pipeline(net, torch.ones(8, 6), devices=devices, micro_batches=2,
                                  loss=nn.MSELoss(), optimizer=optimizer)
            x = torch.ones(8, 6).cumsum(0)
            (pipe.accumulate if accumulates else pipe.train_step)(x, torch.ones(8, 3))
            return net  # and the pipeline is freed

        for accumulates in (False, True):
            wanted = trained(["cpu", "cpu"], accumulates).state_dict()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = trained(["cuda:0", "cuda:1"], accumulates).state_dict()
            assert any(own.category is ResourceWarning and "a pipeline was dropped"
                       in str(own.message) for own in told)
            for name, value in wanted.items():
                # Kernels of simulated GPUs may add in another order.
                torch.testing.assert_close(found[name], value, msg=f"{accumulates} {name}")
    """
    ran = run("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


def test_regression_a_buffer_that_the_user_changes_is_refused():
    """The stage has its own since the first call. A later change was neither seen nor refused."""
    script = """
        import gpipe
        import torch
        from torch import nn

        class Scales(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.ones(6))

            def forward(self, x):
                return x * self.scale

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), Scales(), nn.Linear(6, 3))
        x = torch.ones(8, 6).cumsum(0)
        pipe = gpipe.Pipeline(net, x, devices=["cuda:0", "cuda:1"], micro_batches=2)
        net[1].scale.mul_(2)  # before the stage has its own
        torch.testing.assert_close(pipe.predict(x), net(x).detach())
        net[1].scale.mul_(2)
        for call in (pipe.predict, pipe):
            try:
                call(x)
            except gpipe.errors.SettingError as error:
                assert "the buffer '1.scale' has changed" in str(error)
            else:
                raise AssertionError("the change was not seen")
    """
    ran = run("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr


def test_regression_the_state_of_compats_pipeline_is_the_stages():
    """Running statistics were those before the training."""
    script = """
        import gpipe
        import torch
        from gpipe.compat import GPipe
        from torch import nn

        def state(devices):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
            pipe = GPipe(net, [2, 1], devices=devices, chunks=2)
            pipe(torch.ones(8, 6).cumsum(0)).sum().backward()
            return pipe.state_dict()

        wanted, found = state(["cpu", "cpu"]), state(["cuda:0", "cuda:1"])
        assert wanted["partitions.0.1.running_mean"].abs().sum() > 0
        for name, value in wanted.items():
            # Kernels of simulated GPUs may add in another order.
            torch.testing.assert_close(found[name], value, msg=name)
    """
    ran = run("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr
