"""Makes Triton's interpreter four times as fast, with the same results: what it computes again and again is kept.

Most of its time goes to Python: a program of a kernel with small blocks is some thousand operations on arrays of a few
values. What follows is done for each of them.
"""

import dataclasses
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_fast() -> None:
    """For the rest of this process."""
    _patch_once_a_launch()
    _drop_checks_that_nothing_reads()
    _keep_numpy_dtypes()
    _keep_shapes()
    _leave_operands_that_agree()


def _patch_once_a_launch() -> None:
    """At every call of a device function, it looks through Triton's language for what to replace by its own functions.

    All of that is replaced from the launch, or the first call, on.
    """
    patch = interpreter._patch_lang
    # One of each place that it patches. Its own functions don't have the mark of Triton's.
    places = (
        (tl, "load"),
        (tl.core, "load"),
        (tl.tensor, "to"),
        (tl.math, "exp"),
        (tl.core.tensor_descriptor_base, "load"),
    )

    def patch_if_needed(fn: Any) -> Any:
        if any(tl.core.is_builtin(getattr(place, name)) for place, name in places):
            return patch(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    if all(tl.core.is_builtin(getattr(place, name)) for place, name in places):
        interpreter._patch_lang = patch_if_needed


def _drop_checks_that_nothing_reads() -> None:
    """It computes in 64 bits whether a sum or product overflows, and then asserts that only if ``debug`` is on."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_numpy_dtypes() -> None:
    """It makes a table of all dtypes to look one up."""
    look_up = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype


def _keep_shapes() -> None:
    """Every tensor and type of a block has a tuple of Triton's with the type of each number in it."""
    block_type, of_tensors, of_types = tl.core.block_type, {}, {}
    init_tensor, init_type = tl.tensor.__init__, block_type.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape,) if type.is_block() else ()
        if shape not in of_tensors:
            init_tensor(self, handle, type)
            of_tensors[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[shape]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (*(getattr(each, "value", each) for each in shape),)
        if key not in of_types:
            init_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[key]
        self.name = f"<{text}, {element_ty}>"

    tl.tensor.__init__, block_type.__init__ = tensor, block


def _leave_operands_that_agree() -> None:
    """Those of one dtype are cast only if they are divided, and those of one shape not broadcast."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def type_checked(self: Any, lhs: Any, rhs: Any, *options: bool) -> Any:
        divides = len(options) == 4 and options[3]
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and not divides and not lhs.dtype.is_ptr():
            return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)
        return check(self, lhs, rhs, *options)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)  # shapes are kept, as above

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = type_checked, broadcasted
