"""``GemmContext``: the shape of a GEMM's blocks, its accumulator, and the loop over K.

``acc[m, n] = sum over k of A[m, k] * B[k, n]``, one ``block_m x block_n`` tile of the output at a time, ``block_k`` of
the sum at a time. The accumulator's type follows the operands, never the output: int32 for ``quantized=True`` (exact:
int8 products can't overflow it below K = 131,072), ``acc_dtype`` otherwise. fp8 products are promoted to float32 at
every step, because Hopper's tensor cores otherwise keep only about 14 bits of an fp8 sum.

Nothing is read beyond A's rows: when M is 1, sixteen copies of one row from every SM would contend for one slice of the
L2 cache (docs/performance/int8.md). Beyond B's columns, indices wrap around and other columns are read, which costs
less than a mask. The store masks both.

The tail of K is padded with zeros, once, after the loop over whole blocks, so that the loop needs no mask.
"""

import triton
import triton.language as tl

from qgemm.kernels.stages.aggregate import INTERPRETING, aggregate
from qgemm.kernels.stages.tile import Tile
from qgemm.kernels.stages.views import InputView

DECODED = tl.constexpr(2.0**16)  # the factor by which a product of two values from ``decode_e4m3`` is too small


@triton.jit
def decode_e4m3(x):
    """The e4m3 values whose bytes are int8 ``x``, divided by 2^8, as float16. Exact; not for NaN.

    The bits are only moved: the exponents' biases of the two formats differ by 8, hence the 2^8.
    """
    bits = x.to(tl.int16)
    return (((bits & 0x7F) << 7) | (bits & -0x8000)).to(tl.float16, bitcast=True)


@aggregate
class GemmContext:
    """Compile-time parameters of a GEMM.

    - ``block_m, block_n, block_k``: tile sizes, powers of 2.
    - ``num_sms``: programs along the launch grid's axis 0, usually the number of SMs. Launch that many.
    - ``num_xcds``, ``chunk_size``: the device's chiplets, and how many neighbouring tiles each one gets in a row.
    - ``group_size_m``: rows of tiles that are processed together, so that a column of B stays in cache.
    - ``cache_modifier_a``, ``cache_modifier_b``: for the loads of each operand.
    - ``acc_dtype``: accumulator type of a float product. ``allow_tf32``: whether float32 operands may be multiplied as
      TF32.
    - ``even_k``: whether ``block_k`` divides K. True skips the tail.
    - ``quantized``: int8 operands, int32 accumulator, whatever ``acc_dtype`` says.
    - ``decodes``: operands are the bytes of e4m3 as int8 and are decoded to float16, for devices without fp8 products.
    - ``group_size_n``: columns of tiles that are processed together with those rows, row by row.
    """

    block_m: tl.constexpr
    block_n: tl.constexpr
    block_k: tl.constexpr
    num_sms: tl.constexpr
    num_xcds: tl.constexpr = 1
    group_size_m: tl.constexpr = 8
    chunk_size: tl.constexpr = 1
    cache_modifier_a: tl.constexpr = ".cg"
    cache_modifier_b: tl.constexpr = ".cg"
    acc_dtype: tl.constexpr = tl.float32
    allow_tf32: tl.constexpr = True
    even_k: tl.constexpr = True
    quantized: tl.constexpr = False
    group_size_n: tl.constexpr = 1
    decodes: tl.constexpr = False

    @triton.jit
    def init_accumulator(self):
        """Zeros ``[block_m, block_n]``."""
        if self.quantized:
            return tl.zeros((self.block_m, self.block_n), dtype=tl.int32)
        else:
            return tl.zeros((self.block_m, self.block_n), dtype=self.acc_dtype)

    @triton.jit
    def reduce_tile(self, A: InputView, B: InputView, out_tile: Tile, k_idx, acc, boundary: tl.constexpr = False):
        """``acc`` plus the product of one block of K: columns ``k_idx * block_k + [0, block_k)`` of A.

        ``boundary=True`` if the block may extend beyond K; values there count as 0.
        """
        a_tile = Tile(out_tile.pid_m, k_idx, self.block_m, self.block_k)
        b_tile = Tile(k_idx, out_tile.pid_n, self.block_k, self.block_n)
        a = A.load(a_tile, boundary, self.cache_modifier_a, rows="mask", cols="inside")
        b = B.load(b_tile, boundary, self.cache_modifier_b, rows="inside", cols="wrap")
        if self.decodes:
            a = decode_e4m3(a)
            b = decode_e4m3(b)
        tl.static_assert(
            self.quantized == a.dtype.is_int(), "int8 operands need GemmContext(quantized=True), floats False"
        )
        if INTERPRETING and a.dtype == tl.bfloat16:
            # The interpreter's dot multiplies the integers that hold bf16 values instead of the values.
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        return tl.dot(a, b, acc, allow_tf32=self.allow_tf32, max_num_imprecise_acc=0, out_dtype=acc.dtype)

    @triton.jit
    def reduce_axis(self, A: InputView, B: InputView, out_tile: Tile):
        """The sum over all of K for one output tile: ``[block_m, block_n]``."""
        acc = self.init_accumulator()
        num_whole = A.cols // self.block_k
        for k_idx in range(num_whole):
            acc = self.reduce_tile(A, B, out_tile, k_idx, acc)
        if not self.even_k:
            if num_whole * self.block_k < A.cols:
                acc = self.reduce_tile(A, B, out_tile, num_whole, acc, boundary=True)
        if self.decodes:
            acc *= DECODED
        return acc
