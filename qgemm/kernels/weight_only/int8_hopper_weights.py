"""int4 weights for Hopper's tensor cores (sm_90): ``Weights`` unpacks their bytes and applies scales. In Gluon.

Weights are packed as in ``qgemm.numerics.packing``: 128 bytes of a row have one group of 128 values in their low
nibbles and the next group in their high ones. They become int8 in registers, with three instructions for eight values:
16 times the value or, with zero points, the difference itself. The outputs are divided by the 16, exactly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qgemm.kernels.stages.aggregate import OPTIONAL, aggregate

BLOCK = gl.constexpr(256)  # values along K of a row that ``PANEL`` bytes hold


@aggregate
class Weights:
    """All of a weight except its values: scales ``[N, G]``, zero points of that shape or None, and the bias.

    ``step``: None; or float32 ``[N]``, where each scale of a row is a multiple, 1 to 16, of the row's step. The values
    times this multiple are int8, so the sums of all groups are integers. ``group``: how many values share a scale: 128,
    or a fraction of it; 0 if all of a row do.
    """

    scale: gl.tensor
    zero_point: OPTIONAL
    step: OPTIONAL
    bias: OPTIONAL
    N: gl.tensor
    G: gl.tensor
    group: gl.constexpr
    excess: gl.constexpr
    """The factor of the outputs: 1, or 1 / 16 to undo the unpacking's 16."""
    whole_sums: gl.constexpr
    """Whether the sums over whole rows are integers: rows have a single scale, or a ``step``."""

    @gluon.jit
    def scales(self, rows, g):
        """The scales of group ``g`` of ``rows``; zeros beyond the weight's rows and groups."""
        mask = (rows < self.N) & (g < self.G)
        return gl.load(self.scale + (rows * self.G + g), mask=mask, other=0.0).to(gl.float32)

    @gluon.jit
    def scales_of_block(self, rows, block, GROUPS: gl.constexpr):
        """The scales of the ``GROUPS`` groups of a block of K, followed by the steps of the rows, if there are any."""
        scales = ()
        for i in gl.static_range(GROUPS):
            scales = scales + (self.scales(rows, block * GROUPS + i),)
        if self.step is not None:
            scales = scales + (gl.load(self.step + rows, mask=rows < self.N, other=1.0),)
        return scales

    @gluon.jit
    def multiples(self, scales):
        """The result of ``scales_of_block`` as integer multiples of the steps."""
        GROUPS: gl.constexpr = len(scales) - 1
        found = ()
        for i in gl.static_range(GROUPS):
            found = found + (_quotient(scales[i], scales[GROUPS]),)
        return found

    @gluon.jit
    def fetch_scales(self, rows, block, GROUPS: gl.constexpr, first):
        """Prefetches the scales of ``rows`` for a block of K into L2; consumers load them as late as they need them.

        It does nothing if they came with the block before: L2 loads 32 bytes at a time. ``first``: whether there is no
        block before.
        """
        if self.group:
            BLOCKS: gl.constexpr = max(256 // (self.scale.dtype.element_ty.primitive_bitwidth * GROUPS), 1)
            if first | (block % BLOCKS == 0):
                mask = (rows < self.N) & (block * GROUPS < self.G)
                asm: gl.constexpr = "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}"
                at = (self.scale + (rows * self.G + block * GROUPS)).to(gl.uint64)
                gl.inline_asm_elementwise(asm, "=r,l,r", [at, mask.to(gl.int32)], gl.int32, False, 1)

    @gluon.jit
    def unpacked(self, packed, rows, g, multiple, HALF: gl.constexpr):
        """The low or high nibbles of ``packed`` as int8. They are group ``g`` of ``rows``.

        The result is 16 times the value; with zero points, the value minus the zero point; with ``multiple``, that
        times the value.
        """
        if multiple is not None:
            LAYOUT: gl.constexpr = packed.type.layout
            own = gl.convert_layout(multiple, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
            like = gl.zeros(packed.shape, gl.int32, LAYOUT)
            times = gl.broadcast(own[:, None], like)[0]
            # 128 - 8 * multiple in each byte.
            rest = gl.broadcast((own * -0x08080808 - 0x7F7F7F80)[:, None], like)[0]
            return _low_times(packed, times, rest) if HALF == 0 else _high_times(packed, times, rest)
        elif self.zero_point is None:
            return _low(packed) if HALF == 0 else _high(packed)
        else:
            group = g if self.group else g * 0
            mask = (rows < self.N) & (group < self.G)
            zeros = (gl.load(self.zero_point + (rows * self.G + group), mask=mask, other=0) + 8).to(gl.uint8)
            LAYOUT: gl.constexpr = packed.type.layout
            SHAPE: gl.constexpr = packed.type.shape
            zeros = zeros + gl.zeros(SHAPE, gl.uint8, LAYOUT)
            return _low_less(packed, zeros) if HALF == 0 else _high_less(packed, zeros)

    @gluon.jit
    def of_rows(self, rows):
        """The vectors that ``finish`` needs for ``rows``: their scale if each has a single one, and the bias if any."""
        found = ()
        if self.whole_sums:
            scale = self.scale if self.step is None else self.step
            found = found + (gl.load(scale + rows, mask=rows < self.N, other=0.0).to(gl.float32),)
        if self.bias is not None:
            found = found + (gl.load(self.bias + rows, mask=rows < self.N, other=0.0).to(gl.float32),)
        return found

    @gluon.jit
    def finish(self, sums, x_scale, of_rows):
        """The float32 outputs of ``sums [rows, M]``; ``x_scale [M]``. Sums over whole rows are integers."""
        if self.whole_sums:
            sums = sums.to(gl.float32) * of_rows[0][:, None]
        out = sums * (x_scale * self.excess)[None, :]
        if self.bias is not None:
            out += of_rows[-1][:, None]
        return out


@gluon.jit
def _low(packed):
    asm: gl.constexpr = "{.reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0;}"
    return gl.inline_asm_elementwise(asm, "=r,r", [packed], gl.int8, True, 4)


@gluon.jit
def _high(packed):
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [packed], gl.int8, True, 4)


@gluon.jit
def _quotient(scale, step):
    """``scale / step`` as int32, up to 31. It is an integer except for rounding."""
    # Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    asm: gl.constexpr = (
        "{.reg .f32 q; div.approx.ftz.f32 q, $1, $2; add.f32 q, q, 0f4B400000; mov.b32 $0, q; and.b32 $0, $0, 31;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,f,f", [scale, step], gl.int32, True, 1)


@gluon.jit
def _low_times(packed, times, rest):
    # Offset by 8, values times up to 16 fit in a byte, so nothing is carried into the next byte.
    asm: gl.constexpr = (
        "{.reg .b32 t; lop3.b32 t, $1, 0x0F0F0F0F, 0x08080808, 0x6A; mad.lo.u32 t, t, $2, $6; "
        "xor.b32 $0, t, 0x80808080;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r,r,r,r,r,r", [packed, times, rest], gl.int8, True, 4)


@gluon.jit
def _high_times(packed, times, rest):
    asm: gl.constexpr = (
        "{.reg .b32 t; shr.u32 t, $1, 4; lop3.b32 t, t, 0x0F0F0F0F, 0x08080808, 0x6A; mad.lo.u32 t, t, $2, $6; "
        "xor.b32 $0, t, 0x80808080;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r,r,r,r,r,r", [packed, times, rest], gl.int8, True, 4)


@gluon.jit
def _low_less(packed, zeros):
    # ``zeros``: the zero points plus 8. The eighth bit keeps the subtraction from borrowing from the next byte.
    asm: gl.constexpr = (
        "{.reg .b32 t; and.b32 t, $1, 0x0F0F0F0F; xor.b32 t, t, 0x88888888; sub.u32 t, t, $2; "
        "xor.b32 $0, t, 0x80808080;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r", [packed, zeros], gl.int8, True, 4)


@gluon.jit
def _high_less(packed, zeros):
    asm: gl.constexpr = (
        "{.reg .b32 t; shr.u32 t, $1, 4; and.b32 t, t, 0x0F0F0F0F; xor.b32 t, t, 0x88888888; "
        "sub.u32 t, t, $2; xor.b32 $0, t, 0x80808080;}"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r", [packed, zeros], gl.int8, True, 4)
