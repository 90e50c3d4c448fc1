"""Forward and backward over one global batch, with the same outcome on every rank.

The gradient is that of  (1 / B) sum_i loss_i  over the global batch of B rows, however many
processes share it and in however many chunks of `micro_batch` rows each computes its part:

    zero the gradients -> every chunk forward and backward, locally, no collective
                       -> one SUM all-reduce of all gradients, the loss, and what each rank says:
                          it failed, it was asked to stop, its memory ran out

All of these lie in one flat buffer: one call zeroes them, one reduces them, and CUDA graphs may
write into them. Weights that only other tasks use get no gradient, and the optimizer leaves them
alone. FSDP2 has its own reduction inside backward, which averages over the processes.
"""

import collections
import contextlib
import functools
import sys

import torch
from accelerate.utils import DistributedType

from ups.config import UsageError
from ups.models import precision
from ups.models.precision import products
from ups.train.ranks import PeerFailed

STOP, FAILED = 32, 64  # what a rank says in a step, besides how often its memory ran out
OUT_OF_MEMORY = ("out of memory", "can't allocate memory",  # the second of the host
                 "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error):
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def compile_in_graph(function=None, **options):
    """A function that is compiled inside CUDA graphs: its many small kernels become a few."""
    if function is None:
        return functools.partial(compile_in_graph, **options)
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False, **options))

    @functools.wraps(function)
    def call(*args):
        return (compiled() if CudaGraphed.running else function)(*args)

    return call


def exact_inference(function):
    """A function without gradients, in which compiled models run as they read, for each batch size
    would compile anew, and with exact products: rounded ones err alike in every step."""

    @functools.wraps(function)
    @torch.no_grad()
    @products("highest")
    def call(*args, **options):
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
            return function(*args, **options)
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **options)

    return call


class CudaGraphed:
    """`function(*args)` as CUDA graphs, one for each `args`: two calls warm up, the third is
    captured, later ones replay it.

    It must work on the same memory in every call; what it returns is overwritten by the next one.
    """

    running = False  # whether some function is warming up or being captured

    def __init__(self, function, enabled=True):
        self.function, self.enabled = function, enabled
        self.calls, self.graphs = collections.Counter(), {}

    def __call__(self, *args):
        if not self.enabled:
            return self.function(*args)
        self.calls[args] += 1
        if self.calls[args] < 3:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = self._run(args)
            torch.cuda.current_stream().wait_stream(side)
            return result
        if args not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.graphs[args] = graph, self._run(args)
        graph, result = self.graphs[args]
        graph.replay()
        return result

    def _run(self, args):
        CudaGraphed.running = True
        try:
            return self.function(*args)
        finally:
            CudaGraphed.running = False


class Backward:
    """`backward(batch)` leaves the gradients of the mean loss in the model and returns that loss.

    `loss(model, batch) -> (B,)` gives one value per sample. Every tensor of the batch has the rows
    first; what is no tensor (`task`) is part of the shape of the computation. With CUDA graphs,
    forward and backward of a chunk are captured once for each shape and replayed.
    """

    def __init__(self, run, model, loss):
        self.run, self.model, self.loss = run, model, loss
        self.accelerator = run.accelerator
        self.sharded = self.accelerator.distributed_type == DistributedType.FSDP
        self.rounded = any(getattr(module, "rounded", False) for module in model.modules())
        self.micro_batch = run.cfg.micro_batch
        self.splits = 0  # how often memory ran out so far, on any rank
        self.graphs = {} if run.graphs else None  # shape -> (its inputs, its computation)
        self.checked = False  # whether the model has been seen to leave its buffers alone
        self.params = params = [p for p in model.parameters() if p.requires_grad]
        self.used = {}  # task -> pairs of its weights and their gradients; the others' have none
        # aligned, for vectorised optimizers; then the loss and what each rank says
        sizes = [] if self.sharded else [-(-p.numel() // 64) * 64 for p in params]
        world = self.accelerator.num_processes
        device = self.accelerator.device if self.sharded else params[0].device
        self.flat = torch.zeros(sum(sizes) + 1 + world, dtype=params[0].dtype, device=device)
        *parts, self.mean, _ = self.flat.split([*sizes, 1, world])
        self.grads = [part[: p.numel()].view_as(p) for p, part in zip(params, parts, strict=False)]

    def __call__(self, batch):
        self.settle()
        rows, splits = len(batch["rows"]), 0
        self.micro_batch = min(self.micro_batch or rows, rows)
        run, alone = self.run, contextlib.nullcontext()
        with run.agree.waiting() if self.sharded else alone:
            error = self._attempt(batch, rows)
        while is_out_of_memory(error) and self.micro_batch > 1 and not self.sharded:
            error = None  # its traceback pins the memory that is wanted back
            self._split(1)
            splits += 1
            print(f"rank {self.accelerator.process_index}: out of memory at step {self.run.step}; "
                  f"going on with {self.micro_batch} rows at a time.", file=sys.stderr)
            error = self._attempt(batch, rows)
        if error is not None and self.sharded:
            raise error  # the others wait in FSDP2's own collectives and would never agree
        code = splits + STOP * self.run.stop_requested + FAILED * (error is not None)
        self.run.agree.share(self.flat, code)
        if error is not None:
            self.run.agree.read()  # so that the others have heard it
            raise error
        if not self.run.agree.late:
            self.settle()
        return self.mean.clone()[0]

    def settle(self):
        """Do what all ranks do about what each said in the last step; they all come here at once.

        A smaller micro-batch is adopted, a stop agreed; where a rank failed, all end.
        """
        codes = self.run.agree.read() or [0] * self.accelerator.num_processes
        if max(codes) >= FAILED:
            raise PeerFailed("another rank failed in this step; its own message says why.")
        self.run.stopping |= max(codes) >= STOP
        splits = [code % STOP for code in codes]
        self._split(max(splits) - splits[self.accelerator.process_index])

    def _split(self, times):
        """Halve the micro-batch so many times; CUDA graphs of the larger one are of no more use."""
        for _ in range(times):
            self.micro_batch = (self.micro_batch + 1) // 2
            self.splits += 1
            if self.graphs is not None:
                self.graphs.clear()
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()

    def _attempt(self, batch, rows):
        """All chunks from zero gradients; return the exception, if there is one."""
        try:
            self.flat.zero_()
            check_batch(batch, rows)
            before = None if self.checked else buffers(self.model)
            for p in self.params:
                p.grad = None
            for start in range(0, rows, self.micro_batch):
                part = slice(start, start + self.micro_batch)
                chunk = {key: value[part] if torch.is_tensor(value) else value
                         for key, value in batch.items() if key != "step"}
                (self._chunk if self.graphs is None else self._replay)(chunk, rows)
            if not self.checked:
                check_buffers(before, buffers(self.model))
                self.checked = True
            for p, grad in self.used.get(batch.get("task"), ()):
                p.grad = grad
        except Exception as error:
            # An out-of-memory traceback holds every activation of the failed chunk.
            return error.with_traceback(None) if is_out_of_memory(error) else error
        return None

    def _chunk(self, chunk, rows):
        world, cuda = self.accelerator.num_processes, self.accelerator.device.type == "cuda"
        sync = contextlib.nullcontext() if self.sharded else self.accelerator.no_sync(self.model)
        with sync:
            with products(precision.TRAINING if cuda and self.rounded else "highest"):
                losses = self.loss(self.model, chunk)
                check_losses(losses, len(chunk["rows"]))
                loss = losses.sum() / (rows * world)
            # FSDP2 averages the gradients over the processes, we want their sum
            with products(precision.TRAINING if cuda else "highest"):
                self.accelerator.backward(loss * world if self.sharded else loss)
        self.mean += loss.detach()
        if not self.sharded:  # collect the gradients, all in one launch
            self.used[chunk.get("task")] = used = [
                (p, grad) for p, grad in zip(self.params, self.grads, strict=True)
                if p.grad is not None]
            torch._foreach_add_([grad for _, grad in used], [p.grad for p, _ in used])
            for p, _ in used:
                p.grad = None

    def _replay(self, chunk, rows):
        """`_chunk` as a graph, one for each shape, on inputs of its own.

        Warm-up reads them too: tensors of other strides would compile anew inside the capture.
        """
        tensors = {key: value for key, value in chunk.items() if torch.is_tensor(value)}
        shape = tuple((k, tuple(v.shape) if k in tensors else v) for k, v in sorted(chunk.items()))
        if shape not in self.graphs:
            static = {key: value.contiguous().clone() for key, value in tensors.items()}
            computation = functools.partial(self._chunk, chunk | static, rows)
            self.graphs[shape] = static, CudaGraphed(computation)
        static, replay = self.graphs[shape]
        torch._foreach_copy_(list(static.values()), [tensors[key] for key in static],
                             non_blocking=True)
        replay()


# ---- what a copy of a script may forget


def check_batch(batch, rows):
    """Refuse what cannot be cut into chunks, and what would be a new CUDA graph in every step."""
    for name, value in batch.items():
        if torch.is_tensor(value) and value.shape[:1] != (rows,):
            raise UsageError(f"batch[{name!r}] has the shape {tuple(value.shape)}, and the batch "
                             f"has {rows} rows: expand it to ({rows}, ..), or give it to the loss "
                             "by functools.partial.")
        if isinstance(value, float):
            raise UsageError(f"batch[{name!r}] is a float, and each value of it would be a new "
                             f"CUDA graph: make it a tensor of {rows} rows.")


def check_losses(losses, rows):
    shape = f"the shape {tuple(losses.shape)}" if torch.is_tensor(losses) else "no tensor"
    if shape != f"the shape {(rows,)}":
        raise UsageError(f"the loss has {shape} for {rows} rows: return one value per row, not "
                         f"their mean: ({rows},).")


def check_buffers(before, after):
    """Each is a list of names, tensors and how often they have been written."""
    for (name, *old), (_, *new) in zip(before, after, strict=True):
        if old != new:
            name = name.removeprefix("module.")
            raise UsageError(f"the model changes its buffer {name} in training, as BatchNorm does: "
                             "ranks would differ, and averaged weights not fit it; use a norm "
                             "without statistics, such as GroupNorm.")


def buffers(model):
    return [(name, id(buffer), buffer._version) for name, buffer in model.named_buffers()]


def random_state():
    """Of torch's own generators, which no checkpoint keeps and all processes seed alike."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return torch.cat([torch.get_rng_state(), *cuda])


def check_step(run, before):
    """Look at the first step of a launch, which began in this random state."""
    if not run.backward.checked:
        raise UsageError("a step took no gradients from Backward: call `backward(batch)` in each, "
                         "or the result depends on the number of processes.")
    if run.accelerator.is_main_process and not torch.equal(before, random_state()):
        run.bar.write(f"step {run.step} drew from torch's own generator, as torch.randn and "
                      "dropout do: after a resume, or on other processes, the numbers differ; take "
                      "them from ups.train.noise in `draw`.", file=sys.stderr)
