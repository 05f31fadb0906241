"""A pipeline's life in the user's process: interrupts, exceptions, forks, threads and the exit."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from common import assert_same, batch, model, pipeline, smooth, values
from torch import nn

import gpipe


class Stateful(nn.Module):
    """Its copies have the same state, so that a test can arm the one that a pipeline runs."""

    def __init__(self, state=None):
        super().__init__()
        self.state = {"armed": False} if state is None else state

    def __deepcopy__(self, memo):
        return type(self)(self.state)


class Fails(Stateful):
    """Raises in the forward or the backward of one call, once `armed`."""

    where = "forward"

    def forward(self, x):
        if self.state["armed"] and self.where == "forward":
            raise LookupError("the module's own")
        return _Back.apply(x, self.state) if self.where == "backward" else x


class FailsBackward(Fails):
    where = "backward"


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.state["armed"]:
            raise LookupError("the module's own")
        return grad, None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_arrives_as_it_is_and_changes_nothing(where, schedule):
    kind = Fails if where == "forward" else FailsBackward
    fails = kind()
    own = nn.Sequential(*model()[:4], fails, *model()[4:])
    x, y = batch()
    with pipeline(own, stages=3, schedule=schedule, micro_batches=4, balance=[3, 3, 2]) as pipe:
        pipe.train_step(x, y)
        before = values(own)
        fails.state["armed"] = True
        with pytest.raises(LookupError, match="the module's own") as found:
            pipe.train_step(x, y)
        note = found.value.__notes__[0]
        assert "layer '4'" in note and "stage 1" in note and "micro-batch" in note
        assert_same(values(own), before)
        fails.state["armed"] = False
        expected = pipe.train_step(x, y).loss
    # As if the failed step had not been.
    other = nn.Sequential(*model()[:4], kind(), *model()[4:])
    with pipeline(other, stages=2, schedule=schedule, micro_batches=4) as pipe:
        pipe.train_step(x, y)
        assert pipe.train_step(x, y).loss == expected
    assert_same(values(own), values(other))


def test_regression_a_failed_assertion_has_a_plain_note():
    """It has no message, and the note told it in between all letters."""
    class Asserts(Stateful):
        def forward(self, x):
            assert not self.state["armed"]
            return x

    own = nn.Sequential(nn.Linear(6, 6), Asserts(), nn.Linear(6, 3))
    with pipeline(own, balance=[2, 1]) as pipe:
        own[1].state["armed"] = True
        with pytest.raises(AssertionError) as found:
            pipe.train_step(*batch())
    assert found.value.__notes__ == [
        "gpipe: layer '1', stage 0, micro-batch 0 (0F0); nothing was updated"]


def test_regression_the_note_is_of_the_exception_that_arrives():
    """Two stages that failed at once: the exception was of one, and its note of the other."""
    class Meets(Stateful):
        def forward(self, x):
            self.state["calls"] += self.state["armed"]
            # The first stage passes its first micro-batch on, for the second stage to fail with.
            if not self.state["armed"] or self.state["is_first"] and self.state["calls"] == 1:
                return x
            self.state["barrier"].wait(60)
            raise LookupError(f"the layer is {self.state['name']}")

    for _ in range(10):
        barrier = threading.Barrier(2)
        states = [{"armed": False, "name": name, "calls": 0, "barrier": barrier,
                   "is_first": name == "0"} for name in ("0", "2")]
        own = nn.Sequential(Meets(states[0]), nn.Linear(6, 6), Meets(states[1]), nn.Linear(6, 3))
        with pipeline(own, balance=[2, 2], micro_batches=4, schedule="gpipe") as pipe:
            pipe.train_step(*batch())
            for state in states:
                state["armed"] = True
            with pytest.raises(LookupError) as found:
                pipe.train_step(*batch())
        name = str(found.value)[-1]
        assert found.value.__notes__[0].startswith(f"gpipe: layer '{name}'")


def test_an_exception_of_a_loss_says_that_it_is_the_losss():
    def loss(output, target):
        raise LookupError("the loss's own")

    x, y = batch()
    with pipeline(model(), loss=loss) as pipe:
        with pytest.raises(LookupError) as found:
            pipe.train_step(x, y)
    assert found.value.__notes__ == ["gpipe: the loss, counting the targets; nothing has run"]


class Interrupts(Stateful):
    """Sends Ctrl-C in its first call once armed, and waits until Python has seen it."""

    def forward(self, x):
        if self.state["armed"]:
            self.state["armed"] = False
            os.kill(os.getpid(), signal.SIGINT)
            assert self.state["seen"].wait(60)
            if self.state["twice"]:  # before `pthread_kill` returns, this thread has the signal
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return x


@pytest.mark.parametrize("twice", [False, True])
def test_control_c_ends_a_step_and_changes_nothing(twice):
    # A second one broke into the user's `except KeyboardInterrupt`.
    state = {"armed": False, "seen": threading.Event(), "twice": twice}
    own = nn.Sequential(Interrupts(state), *model())
    x, y = batch(32)

    def handler(*_):
        state["seen"].set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        with pipeline(own, stages=3, micro_batches=8) as pipe:
            before = values(own)
            state["armed"] = True
            with pytest.raises(KeyboardInterrupt):
                pipe.train_step(x, y)
            assert_same(values(own), before)
            assert pipe.train_step(x, y).step == 1
    finally:
        signal.signal(signal.SIGINT, previous)


def test_regression_an_interrupted_call_leaves_no_forward_open():
    """Where the forward ran to its end all the same, nobody had its outputs to drop, and each
    further step was refused for it."""
    state = {"armed": False, "seen": threading.Event(), "twice": False}
    own = nn.Sequential(*model(), Interrupts(state))  # after it, nothing looks for interrupts
    x, y = batch()

    def handler(*_):
        state["seen"].set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        with pipeline(own, micro_batches=1) as pipe:
            state["armed"] = True
            with pytest.raises(KeyboardInterrupt):
                pipe(x)
            assert pipe.train_step(x, y).step == 1
    finally:
        signal.signal(signal.SIGINT, previous)


class Replaced:
    """An engine of which some methods are others."""

    def __init__(self, engine, **methods):
        self.engine = engine
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self.engine, name)


KINDS = {"counters": model, "copies": lambda: smooth(torch.bfloat16)}


@pytest.mark.parametrize("kind", KINDS)
def test_regression_an_interrupt_after_the_update_leaves_the_module_up_to_date(kind):
    """Ctrl-C while a step ends does not undo its update. The module then lacked the update, or the
    count of the mini-batch, and its state was saved so."""
    def trained(interrupted):
        own = KINDS[kind]()
        x, y = batch(dtype=next(own.parameters()).dtype)
        with pipeline(own) as pipe:
            engine = pipe._engine

            def train_step(*arguments):
                engine.train_step(*arguments)
                raise KeyboardInterrupt

            pipe.train_step(x, y)
            if interrupted:
                pipe._engine = Replaced(engine, train_step=train_step)
                with pytest.raises(KeyboardInterrupt):
                    pipe.train_step(x, y)
                pipe._engine = engine
            else:
                pipe.train_step(x, y)
            assert pipe.steps == 2
            found = values(own)
            with torch.no_grad():
                next(own.parameters()).mul_(0.5)  # the stages have nothing newer than the module
            return found, pipe.train_step(x, y).loss, values(own)

    (found, loss, after), (wanted, wanted_loss, wanted_after) = trained(True), trained(False)
    assert_same(found, wanted)
    assert loss == wanted_loss
    assert_same(after, wanted_after)


def unusable(pipe):
    """The pipeline's engine, which gives no parameters any more, as after a thread is lost."""
    def parameters(_):
        raise gpipe.errors.StepError("the pipeline cannot be used any more")

    return Replaced(pipe._engine, parameters=parameters)


def test_regression_a_block_that_raises_ends_with_its_own_exception():
    """Where stages have copies that cannot be had any more, the error of that took its place."""
    with pytest.raises(LookupError, match="the user's own") as found:
        with pipeline(smooth(torch.bfloat16)) as pipe:
            pipe._engine = unusable(pipe)
            raise LookupError("the user's own")
    assert found.value.__notes__ == [
        "gpipe: the module may lack the last updates: the pipeline cannot be used any more"]
    with pytest.raises(gpipe.errors.StepError, match="cannot be used"):
        with pipeline(smooth(torch.bfloat16)) as pipe:
            pipe._engine = unusable(pipe)


def test_regression_the_exit_ends_every_pipeline():
    """The first one that could not be closed kept the others open, and layers that were given up
    were not ended."""
    out = run("""
        import atexit
        made = []
        # Called last: what is registered last is called first.
        atexit.register(lambda: print([pipe._engine for pipe in made]))
        import torch
        from common import pipeline, smooth
        from test_life import unusable
        import gpipe
        gpipe.threads.end_layers = lambda: print("no layer runs")
        for _ in range(2):
            made.append(pipeline(smooth(torch.bfloat16)))
            made[-1]._engine = unusable(made[-1])
    """)
    assert out == "no layer runs\n[None, None]\n"


def test_a_pipeline_that_cannot_be_made_is_dropped_in_silence(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda own: seen.append(repr(own.object)))
    with pytest.raises(TypeError):
        gpipe.Pipeline(model())
    gc.collect()
    assert not [own for own in seen if "__del__" in own]


def test_a_layer_that_calls_its_pipeline_is_an_error():
    class Calls(nn.Module):
        def forward(self, x):
            if holder:
                holder[0].predict(x)
            return x

        def __deepcopy__(self, memo):
            return Calls()

    holder = []
    own = nn.Sequential(Calls(), *model())
    with pipeline(own) as pipe:
        holder.append(pipe)
        with pytest.raises(gpipe.errors.SettingError, match="would wait for itself"):
            pipe.train_step(*batch())
        holder.clear()
        pipe.train_step(*batch())


def test_several_threads_may_call_it():
    own = model()
    found, threads = [], []
    with pipeline(own) as pipe:
        def work():
            for _ in range(5):
                found.append(pipe.evaluate(*batch()).loss)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(found)) == 1 and len(found) == 20


def test_pipelines_end_when_they_are_dropped():
    for _ in range(5):
        pipe = pipeline(model())
        pipe.train_step(*batch())
        del pipe
    gc.collect()
    names = [own for own in os.listdir("/proc/self/task")]
    for _ in range(5):
        pipe = pipeline(model())
        pipe.train_step(*batch())
        del pipe
    gc.collect()
    assert len(os.listdir("/proc/self/task")) <= len(names) + 1


def test_a_closed_pipeline_says_so():
    pipe = pipeline(model())
    pipe.close()
    pipe.close()
    assert repr(pipe) == "Pipeline(closed)"
    for call in [lambda: pipe.train_step(*batch()), lambda: pipe(batch()[0]), lambda: pipe.steps,
                 lambda: pipe.sync()]:
        with pytest.raises(gpipe.errors.SettingError, match="closed"):
            call()


def test_it_cannot_be_copied_or_pickled():
    with pipeline(model()) as pipe:
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="threads"):
                attempt(pipe)


def test_the_users_generator_is_left_alone():
    own = model()
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with pipeline(own) as pipe:
        pipe.train_step(*batch())
        pipe.evaluate(*batch())
    assert torch.equal(torch.rand(4), expected)


def run(text, *arguments):
    """Runs a program of its own."""
    program = textwrap.dedent(text)
    found = subprocess.run([sys.executable, "-c", program, *arguments], text=True,
                           capture_output=True, timeout=300,
                           cwd=os.path.dirname(os.path.abspath(__file__)))
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_interpreter_exits_with_an_open_pipeline():
    out = run("""
        from common import batch, model, pipeline
        pipe = pipeline(model())
        pipe.train_step(*batch())
        holder = [pipe]
        holder.append(holder)  # a circle
        print("done")
    """)
    assert out == "done\n"


def test_it_exits_after_an_exception():
    program = textwrap.dedent("""
        from common import batch, model, pipeline
        pipe = pipeline(model())
        pipe.train_step(*batch())
        raise SystemExit(7)
    """)
    found = subprocess.run([sys.executable, "-c", program], timeout=300,
                           cwd=os.path.dirname(os.path.abspath(__file__)))
    assert found.returncode == 7


def test_regression_it_exits_while_a_layer_that_was_given_up_still_runs():
    """After a TimedOutError the interpreter aborted at its exit, and lost the exit code."""
    program = textwrap.dedent("""
        from common import batch, pipeline
        import torch
        from torch import nn
        import gpipe

        class Hangs(nn.Module):
            def forward(self, x):
                while armed:
                    x = x + 1
                return x

        armed = []
        pipe = pipeline(nn.Sequential(nn.Linear(6, 6), Hangs(), nn.Linear(6, 3)), timeout=2.0)
        pipe.train_step(*batch())
        armed.append(True)
        try:
            pipe.train_step(*batch())
        except gpipe.errors.TimedOutError:
            raise SystemExit(7)
    """)
    found = subprocess.run([sys.executable, "-c", program], timeout=300,
                           cwd=os.path.dirname(os.path.abspath(__file__)))
    assert found.returncode == 7


def test_loaders_that_fork_work():
    out = run("""
        import torch
        from torch.utils.data import DataLoader, Dataset
        from common import batch, model, pipeline

        class Data(Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, at):
                generator = torch.Generator().manual_seed(at)
                big = torch.rand(300, 300, generator=generator)  # from the counting allocator
                return big[0, :6] + 0 * big.sum(), torch.rand(3, generator=generator)

        own = model()
        with pipeline(own) as pipe:
            pipe.train_step(*batch())
            for epoch in range(2):
                loader = DataLoader(Data(), 8, num_workers=2, multiprocessing_context="fork")
                for x, y in loader:
                    report = pipe.train_step(x, y)
        print(report.step)
    """)
    assert out == "17\n"


def test_a_fork_is_told_that_it_has_no_threads():
    out = run("""
        import os, sys
        from common import batch, model, pipeline
        import gpipe

        pipe = pipeline(model())
        pipe.train_step(*batch())
        child = os.fork()
        if child == 0:
            try:
                pipe.train_step(*batch())
            except gpipe.errors.SettingError as error:
                os.write(1, b"refused\\n" if "fork" in str(error) else b"?\\n")
            del pipe
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pipe.train_step(*batch())
        print(pipe.steps)
    """)
    assert out == "refused\n2\n"


def test_importing_it_while_threads_compute_is_safe():
    """The allocator is replaced while others allocate and free."""
    out = run("""
        import threading, torch
        torch.set_num_threads(1)
        stop, rounds = threading.Event(), [0] * 4

        def work(number):
            kept = []
            while not stop.is_set():
                x = torch.ones(64 + number, 700)
                kept.append(x @ x.T)
                if len(kept) > 8:
                    assert all(float(own[0, 0]) == 700 for own in kept)
                    kept.clear()
                rounds[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while min(rounds) < 20:
            pass
        before = list(rounds)
        import gpipe
        while min(a - b for a, b in zip(rounds, before)) < 20:
            pass
        stop.set()
        for thread in threads:
            thread.join()
        print("done")
    """)
    assert out == "done\n"


def test_regression_an_evaluation_beside_a_step_leaves_its_modes():
    """A second thread's evaluation switched dropout off in a step that ran."""
    class Waits(Stateful):
        def forward(self, x):
            if self.training and self.state["armed"]:
                self.state["armed"] = False
                self.state["begun"].set()
                self.state["asked"].wait(60)
            return x

    def losses(beside):
        state = {"armed": False, "begun": threading.Event(), "asked": threading.Event()}
        own = nn.Sequential(Waits(state), nn.Dropout(0.5), nn.Linear(6, 3))
        torch.manual_seed(0)
        own[2].reset_parameters()
        with pipeline(own, micro_batches=4) as pipe:
            pipe.predict(batch()[0])
            state["armed"] = True

            def ask():
                state["begun"].wait(60)
                threading.Timer(0.2, state["asked"].set).start()
                if beside:
                    pipe.predict(batch()[0])

            other = threading.Thread(target=ask)
            other.start()
            found = [pipe.train_step(*batch()).loss for _ in range(2)]
            other.join()
        return found

    assert losses(beside=True) == losses(beside=False)


def test_regression_the_interpreter_exits_while_a_daemon_thread_is_in_a_call():
    out = run("""
        import threading
        from common import batch, model, pipeline
        pipe = pipeline(model())
        x, y = batch()  # PyTorch's own operators do not survive the interpreter's end in a thread
        pipe.train_step(x, y)

        def work():
            while True:
                pipe.train_step(x, y)

        begun = pipe.steps
        threading.Thread(target=work, daemon=True).start()
        while pipe.steps < begun + 3:
            pass
        print("done")
    """)
    assert out == "done\n"


def test_a_fork_reads_the_models_state():
    own = model()
    with pipeline(own) as pipe:
        pipe.train_step(*batch())
        child = os.fork()
        if child == 0:
            os._exit(0 if own.state_dict().keys() == values(own).keys() else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("where", ["sum", "count", "backward"])
def test_regression_a_loss_that_calls_its_pipeline_is_an_error(where):
    """It waited for itself: for ever where the loss counts, and for the timeout elsewhere."""
    calls = []
    x, y = batch()

    def ask(at):
        if at == where and calls:
            calls[0].predict(x)

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ask("backward")
            return grad

    class Layer(nn.Module):
        def forward(self, x):
            return Asks.apply(x)

    def summed(output, target):
        ask("sum")
        return ((output - target) ** 2).sum()

    def count(target):
        ask("count")
        return target.numel()

    own = nn.Sequential(nn.Linear(6, 6), Layer(), nn.Linear(6, 3))
    with pipeline(own, loss=gpipe.Loss(sum=summed, count=count)) as pipe:
        calls.append(pipe)
        with pytest.raises(gpipe.errors.SettingError, match="would wait for itself"):
            pipe.train_step(x, y)
        calls.clear()
        assert pipe.train_step(x, y).step == 1


def test_a_loss_may_count_updates_and_ask_another_pipeline():
    """As a warm-up of one of its terms does, and a teacher."""
    seen = []
    x, y = batch()
    with pipeline(model()) as teacher:
        def loss(output, target):
            seen.append(pipe.steps)
            wanted = teacher.predict(x[:target.size(0)])
            return ((output - wanted) ** 2).sum(), target.numel()

        with pipeline(model(seed=1), loss=loss) as pipe:
            for _ in range(3):
                pipe.train_step(x, y)
            assert pipe.steps == 3
    assert sorted(set(seen)) == [0, 1, 2]
