"""``fast_forward``: a model's forward as CUDA graphs, one for each form of its inputs.

In eager mode the host needs 5 to 15 us for each operator of a model, also where its kernel takes 3. The kernels of a
graph follow one another without the host.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from qgemm.arguments import check_model, shown
from qgemm.replay.graphs import CaptureError, GraphMemory, Replayed
from qgemm.replay.snapshot import Snapshot, UnfitModelError
from qgemm.replay.values import UnfitValueError, form_of, put_together, take_apart
from qgemm.warn import warn_user

Model = TypeVar("Model", bound=nn.Module)

_REPLICATE = "_replicate_for_data_parallel"  # nn.DataParallel's method of a module
_STATEFUL = "_diffusers_hook"  # the attribute of a module for its hooks: caches of steps, offloading by groups
MAX_GRAPHS = 64
MAX_CHANGES = 4
"""How often in succession graphs may be captured again before any of them was replayed."""


def fast_forward(model: Model, enabled: bool = True, *, max_graphs: int = MAX_GRAPHS) -> Model:
    """Makes calls of ``model`` on a GPU as fast as its kernels, by CUDA graphs; returns ``model``.

    It is for models whose calls wait for the host: encoders on few tokens, diffusion transformers on small images. The
    first call with other shapes, dtypes or plain values runs the model and then captures it, which takes about three
    times as long. Later calls copy their inputs, replay the graph, and copy its outputs. After parameters, modules,
    hooks or attributes were changed, graphs are captured again. There are at most ``max_graphs``, which share the
    memory of one pass's activations; calls beyond them run as before.

    Call the model under ``torch.inference_mode()`` or ``no_grad()``. With gradients, in training mode, on a CPU, with
    autocast, under compilers and modes of PyTorch, and if an input is neither a tensor on the model's GPU nor a plain
    value (a cache, for example), calls run as before. If the model can't be captured, because it reads values of
    tensors on the host or keeps state, or as long as its modules have hooks, a warning gives the reason. Changes inside
    objects other than modules, lists and dictionaries aren't noticed: after such, call ``fast_forward`` again.

    ``enabled=False`` restores the forward and frees the graphs.

    Raises ``TypeError`` unless ``model`` is a module, ``ValueError`` unless ``max_graphs`` is a positive integer.
    """
    check_model(model)
    if type(max_graphs) is not int or max_graphs < 1:
        raise ValueError(f"max_graphs is {shown(max_graphs)}; it must be a positive integer")
    attributes = vars(model)
    # Hooks of other libraries may have been put around it, and keep it under another name.
    for forward in [each for each in attributes.values() if isinstance(each, GraphedForward)]:
        forward.end()
        if attributes.get("forward") is forward:
            del attributes["forward"]
            if forward.former is not None:
                attributes["forward"] = forward.former
        if getattr(attributes.get(_REPLICATE), "__self__", None) is forward:
            del attributes[_REPLICATE]
    if enabled:
        forward = attributes["forward"] = GraphedForward(model, attributes.get("forward"), max_graphs)
        attributes.setdefault(_REPLICATE, forward.replicate)  # that of a fused module leaves out any forward
    return model


class _Graph:
    """A forward for inputs of one form."""

    def __init__(self, memory: GraphMemory, structure: Any, inputs: list[Tensor]) -> None:
        """``structure``: that of the arguments, with ``inputs`` for their tensors."""
        self.inputs = inputs
        """The tensors that runs read."""
        self.result: Any = None
        """Of the last run that wasn't a replay; the next run overwrites its tensors."""
        self._structure = structure
        self._result_structure: Any = None
        self._outputs: list[Tensor] = []
        self._replayed = Replayed(memory)

    def run(self, forward: Callable[[Any, Any], Any]) -> None:
        """Runs ``forward``; the second time it is captured, and then replayed. Raises ``CaptureError``."""

        def run() -> None:
            args, kwargs = put_together(self._structure, self.inputs)
            self.result = forward(args, kwargs)
            self._result_structure = None

        self._replayed(run)

    def copied(self) -> Callable[[], Any]:
        """Makes copies of the outputs; returns what puts the result together. Raises ``UnfitValueError``."""
        if self._result_structure is None:
            self._outputs = []
            self._result_structure = take_apart(self.result, self._outputs)
        copies = [each.clone() for each in self._outputs]
        return lambda: put_together(self._result_structure, copies)

    def end(self) -> None:
        """Ends the captured graph."""
        self._replayed.end()


class GraphedForward:
    """The ``forward`` of an instance of a model. It doesn't keep the model alive."""

    def __init__(self, model: nn.Module, former: Callable[..., Any] | None, max_graphs: int) -> None:
        """``former``: the instance's own forward, if it has one besides its class's: hooks of other libraries."""
        self.former = former
        self.max_graphs = max_graphs
        self.unfit = ""
        """Why calls run without graphs, if they do."""
        self._model = weakref.ref(model)
        # What others read of a method.
        self.__signature__ = inspect.signature(model.forward)
        self.__code__ = getattr(model.forward, "__code__", None)
        self._running = threading.Lock()
        self._memory: GraphMemory | None = None
        self._graphs: dict[Hashable, _Graph] = {}
        self._snapshot: Snapshot | None = None
        self._stream: torch.cuda.Stream | None = None
        self._changes = 0
        self._told: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedForward:
        """For the copy of the model, without graphs."""
        model: Any = self._model()
        return GraphedForward(memo.get(id(model), model), copy.deepcopy(self.former, memo), self.max_graphs)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a copy."""
        return GraphedForward, (self._model(), self.former, self.max_graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward."""
        if torch.compiler.is_compiling() or self.unfit or self._is_watched():
            return self._run(args, kwargs)
        if torch.is_grad_enabled():
            self._tell("gradients are on; call it under torch.inference_mode()")
            return self._run(args, kwargs)
        if not self._running.acquire(blocking=False):  # another thread is here, or the model calls itself
            return self._run(args, kwargs)
        try:
            return self._run_graph(args, kwargs)
        finally:
            self._running.release()

    def replicate(self) -> nn.Module:
        """For ``nn.DataParallel``: a replica of the model on another GPU, whose calls run without graphs."""
        model: Any = self._model()
        replica: nn.Module = type(model)._replicate_for_data_parallel(model)
        attributes = vars(replica)
        del attributes[_REPLICATE]
        if attributes.get("forward") is self:
            del attributes["forward"]
            if self.former is not None:
                attributes["forward"] = self.former
        return replica

    def end(self) -> None:
        """Ends all graphs. From now on calls run without any."""
        self.unfit = "they were turned off"
        self._forget()

    def _is_watched(self) -> bool:
        """Whether a call is more than its kernels, besides gradients: by modes and the like, or as part of a graph."""
        model = self._model()
        return (
            (model is not None and model.training)
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._len_torch_function_stack() > 0
            or torch._C._functorch.maybe_current_level() is not None
            or torch._C._is_any_autocast_enabled()
            or torch._C._is_tracing()
            or bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
            or forward_ad._current_level >= 0
            or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        )

    def _tell(self, reason: str) -> None:
        """Warns, once per reason, if the model is on a GPU."""
        model = self._model()
        if model is not None and reason not in self._told and any(each.is_cuda for each in model.parameters()):
            self._told.add(reason)
            warn_user(f"calls of {type(model).__name__} run without CUDA graphs: {reason}")

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.former is not None:
            return self.former(*args, **kwargs)
        model: Any = self._model()
        if model is None:
            raise RuntimeError(
                "this model is a shallow copy (copy.copy) of one that is gone, with its fast_forward: call "
                "qgemm.fast_forward(model) on the copy"
            )
        return type(model).forward(model, *args, **kwargs)

    def _run_graph(self, args: Any, kwargs: Any) -> Any:
        given: list[Tensor] = []
        try:
            structure = take_apart((args, kwargs), given)
        except UnfitValueError as error:
            self._tell(f"an input is or holds a {error}")
            return self._run(args, kwargs)
        memory = self._memory_on(_common_device(given))
        if memory is None:
            return self._run(args, kwargs)
        if self._snapshot is not None and not self._snapshot.memory_holds():
            self._forget()
        tensors = [(each.shape, each.stride(), each.dtype) for each in given]
        form = (*_settings(), form_of(structure), *tensors)
        with torch.cuda.device(memory.device) if memory.device.type == "cuda" else contextlib.nullcontext():
            if (graph := self._graphs.get(form)) is not None:
                copied = self._replay(graph, given)
                # The GPU is at work: the time to look at everything that can't harm it.
                if self._snapshot is not None and self._snapshot.values_hold():
                    self._changes = 0
                    return copied()
                self._forget()
            if len(self._graphs) < self.max_graphs:
                if not self._has_hooks():
                    return self._capture(form, _Graph(memory, structure, given))
                self._tell("its modules have hooks, whose code a graph doesn't run")
        return self._run(args, kwargs)

    def _has_hooks(self) -> bool:
        """Whether there is code of others to be run in each call; transformers' hooks collect outputs, which graphs do.

        The model's own hooks run around its forward.
        """
        model = self._model()
        inside = [] if model is None else [each for each in model.modules() if each is not model]
        hooks = [hook for each in inside for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())]
        return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)

    def _memory_on(self, device: torch.device | None) -> GraphMemory | None:
        """What graphs on ``device`` share; None where there are none."""
        if device is None:
            return None
        if self._memory is None or self._memory.device != device:
            self._forget()
            self._memory = GraphMemory(device, distributed.is_available() and distributed.is_initialized())
        return self._memory if self._memory.captures else None

    def _replay(self, graph: _Graph, given: Sequence[Tensor]) -> Callable[[], Any]:
        if graph.inputs[0].is_cuda:
            stream = torch.cuda.current_stream()
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)  # graphs share memory, so two don't run at the same time
            self._stream = stream
        for own, tensor in zip(graph.inputs, given, strict=True):
            own.copy_(tensor)
        graph.run(self._run)
        return graph.copied()

    def _capture(self, form: Hashable, graph: _Graph) -> Any:
        """The result of a call with inputs of a new form. Keeps a graph for more such calls if there can be one."""
        model, given = self._model(), graph.inputs
        assert model is not None
        fixed = [*model.parameters(), *model.buffers()]
        versions = _versions((*given, *fixed))
        graph.run(self._run)
        result = graph.result
        try:
            if self._changes > MAX_CHANGES:
                raise UnfitModelError("its attributes change between calls")
            _check_fits(model, fixed, given[0].device)
            if _versions((*given, *fixed)) != versions:
                raise UnfitModelError("it writes to its inputs or buffers")
            take_apart(result, [])
            snapshot = Snapshot(model, _configs(model))
            graph.inputs = [torch.empty_like(each) for each in given]
            copied = self._replay(graph, given)
            if not snapshot.holds():
                raise UnfitModelError("its attributes change in each call")
        except (UnfitModelError, UnfitValueError, CaptureError) as error:
            self._forget()
            what = "its output holds a " if isinstance(error, UnfitValueError) else ""
            self.unfit = f"{what}{error}"
            warn_user(f"calls of {type(model).__name__} run without CUDA graphs: {self.unfit}")
            return result
        if self._snapshot is not None and not self._snapshot.holds():
            self._forget()  # this call has changed an attribute, such as a table that grows
        self._snapshot = self._snapshot or snapshot
        self._graphs[form] = graph
        graph.result = None
        return copied()

    def _forget(self) -> None:
        self._changes += bool(self._graphs)
        if self._stream is not None:
            self._stream.synchronize()  # the last one may still run
            self._stream = None
        for graph in self._graphs.values():
            graph.end()
        self._graphs.clear()
        self._snapshot = None


def _common_device(tensors: Sequence[Tensor]) -> torch.device | None:
    devices = {each.device for each in tensors}
    return devices.pop() if len(devices) == 1 else None


def _settings() -> tuple[Hashable, ...]:
    """What PyTorch chooses kernels by, besides their inputs."""
    return (
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Numbers that writing to a tensor changes. Tensors of inference mode have none."""
    return [each._version for each in tensors if not each.is_inference()]


def _configs(model: nn.Module) -> list[object]:
    """What modules of transformers read besides their attributes."""
    config = getattr(model, "config", None)
    nested = [*vars(config).values()] if hasattr(config, "__dict__") else []
    return [each for each in (config, *nested) if type(each) is not type and hasattr(each, "__dict__")]


def _check_fits(model: nn.Module, fixed: Sequence[Tensor], device: torch.device) -> None:
    if elsewhere := {str(each.device) for each in fixed if each.device != device}:
        raise UnfitModelError(f"it has parameters on {', '.join(sorted(elsewhere))}, and inputs on {device}")
    if any(_STATEFUL in vars(module) for module in model.modules()):
        raise UnfitModelError("it has hooks of diffusers, which keep state")
