"""Forward and backward over one global batch, with the same outcome on every rank.

The gradient is that of  (1 / B) sum_i loss_i  over the global batch of B rows, however many
processes share it and in however many chunks of `micro_batch` rows each computes its part:

    zero the gradients -> every chunk forward and backward, locally, no collective
                       -> one agreement: did a rank fail, was one asked to stop, memory
                       -> one SUM all-reduce of all gradients and the loss

All gradients live in one flat buffer: one call zeroes them, one reduces them, and CUDA graphs may
write into them. Weights that only other tasks use get none, and the optimizer leaves them alone.
FSDP2 has its own reduction inside backward, which averages over the processes.
"""

import collections
import contextlib
import functools
import sys

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

from ups.config import UsageError
from ups.models import precision
from ups.models.precision import products
from ups.train.ranks import PeerFailed

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
    """A function in which compiled models run as they read, for each batch size would compile
    anew, and with exact products: rounded ones err alike in every step of a roll-out."""

    @functools.wraps(function)
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
        self.micro_batch = run.cfg.micro_batch
        self.splits = 0  # how often memory ran out so far, on any rank
        self.graphs = {} if run.graphs else None  # shape -> (its inputs, its computation)
        self.checked = False  # whether the model has been seen to leave its buffers alone
        params = [p for p in model.parameters() if p.requires_grad]
        self.params, self.grads = params, []
        self.used = {}  # task -> pairs of its weights and their gradients; the others' have none
        if self.sharded:
            self.flat = torch.zeros(1, dtype=params[0].dtype, device=self.accelerator.device)
            return
        sizes = [-(-p.numel() // 64) * 64 for p in params]  # aligned, for vectorised optimizers
        self.flat = torch.zeros(sum(sizes) + 1, dtype=params[0].dtype, device=params[0].device)
        for p, part in zip(params, self.flat[:-1].split(sizes), strict=True):
            self.grads.append(part[: p.numel()].view_as(p))

    def __call__(self, batch):
        rows = len(batch["rows"])
        self.micro_batch = min(self.micro_batch or rows, rows)
        error = self._attempt(batch, rows)
        while is_out_of_memory(error) and self.micro_batch > 1 and not self.sharded:
            error = None  # its traceback pins the memory that is wanted back
            self._free()
            self.micro_batch = (self.micro_batch + 1) // 2
            self.splits += 1
            print(f"rank {self.accelerator.process_index}: out of memory at step {self.run.step}; "
                  f"going on with {self.micro_batch} rows at a time.", file=sys.stderr)
            error = self._attempt(batch, rows)
        if error is not None and self.sharded:
            raise error  # the others wait in FSDP2's own collectives and would never agree

        failed, stop, smallest, self.splits = self.run.agree(
            error is not None, self.run.stop_requested, -self.micro_batch, self.splits)
        if error is not None:
            raise error
        if failed:
            raise PeerFailed("another rank failed in this step; its own message says why.")
        self.run.stopping = bool(stop)
        if -smallest < self.micro_batch:
            self._free()  # graphs of the larger size are of no more use
            self.micro_batch = -smallest

        if self.accelerator.num_processes > 1:
            dist.all_reduce(self.flat)  # sums
        return self.flat[-1].clone()

    def _attempt(self, batch, rows):
        """All chunks from zero gradients; return the exception, if there is one."""
        try:
            check_batch(batch, rows)
            before = None if self.checked else buffers(self.model)
            self.flat.zero_()
            for p in self.params:
                p.grad = None
            for start in range(0, rows, self.micro_batch):
                chunk = {key: value[start : start + self.micro_batch]
                         if torch.is_tensor(value) else value
                         for key, value in batch.items() if key != "step"}
                if self.graphs is None:
                    self._chunk(chunk, rows)
                else:
                    self._replay(chunk, rows)
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
        world = self.accelerator.num_processes
        sync = contextlib.nullcontext() if self.sharded else self.accelerator.no_sync(self.model)
        cuda = self.accelerator.device.type == "cuda"
        with sync:
            with products("highest"):
                losses = self.loss(self.model, chunk)
                check_losses(losses, chunk)
                loss = losses.sum() / (rows * world)
            # FSDP2 averages the gradients over the processes, we want their sum
            with products(precision.BACKWARD if cuda else "highest"):
                self.accelerator.backward(loss * world if self.sharded else loss)
        self.flat[-1] += loss.detach()
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

    def _free(self):
        if self.graphs is not None:
            self.graphs.clear()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()


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


def check_losses(losses, chunk):
    rows = len(chunk["rows"])
    if not torch.is_tensor(losses) or losses.shape != (rows,):
        shape = f"the shape {tuple(losses.shape)}" if torch.is_tensor(losses) else "no tensor"
        raise UsageError(f"the loss has {shape} for {rows} rows: return one value per row, not "
                         f"their mean: ({rows},).")


def buffers(model):
    """Which tensor each buffer is, and how often it has been written."""
    return {name.removeprefix("module."): (id(buffer), buffer._version)
            for name, buffer in model.named_buffers()}


def check_buffers(before, after):
    for name in before:
        if before[name] != after.get(name):
            raise UsageError(f"the model changes its buffer {name} in training, as BatchNorm does: "
                             "ranks would differ, and averaged weights not fit it; use a norm "
                             "without statistics, such as GroupNorm.")
