"""Every kernel compiles for every target, and the machine code uses what the hardware has. No GPU is needed.

``compile_kernels.py`` does the compiling, in one process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qgemm.kernels.weight_only.int8_config import RESERVED_BYTES
from tests.kernels.devices import A100, B200, H200, MI300X, MI355X, RTX_3090, RTX_4090, RTX_5090

pytestmark = pytest.mark.compile
Result = dict[str, Any]

SCRIPT = Path(__file__).with_name("compile_kernels.py")
ROOT = Path(__file__).parents[2]
DEVICES = {"sm_80": A100, "sm_90": H200, "sm_100": B200, "gfx942": MI300X, "gfx950": MI355X}
TARGETS = list(DEVICES)
NVIDIA = ["sm_80", "sm_90", "sm_100"]
CONSUMER = {"sm_86": RTX_3090, "sm_89": RTX_4090, "sm_120": RTX_5090}
EVERY_TARGET = pytest.mark.parametrize(
    "target", [*TARGETS, *(pytest.param(name, marks=pytest.mark.complete) for name in CONSUMER)]
)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> list[Result]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    # Which takes an eighth of the time, and changes the order of instructions at most.
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    options, timeout = (["--complete"], 3600) if pytestconfig.getoption("--complete") else ([], 600)
    command = [sys.executable, str(SCRIPT), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def of(results: list[Result], target: str, *prefixes: str) -> list[Result]:
    """The results of a target of the cases whose label starts with one of ``prefixes``."""
    found = [r for r in results if r["target"] == target and r["case"].startswith(prefixes or ("",))]
    assert found, f"nothing was compiled for {target}: {prefixes}"
    return found


INT8 = ("scaled", "int32", "linear", "grouped tiles", "grouped persistent", "grouped ragged")


@EVERY_TARGET
def test_everything_compiles(target: str, results: list[Result]) -> None:
    compiled = of(results, target)
    assert not [f"{r['kernel']}: {r['error']}" for r in compiled if "error" in r]
    kinds = {r["case"].split()[0] for r in compiled}
    # gfx942 has too little shared memory for the Stream-K candidates; "int32 streamk" is compiled there all the same.
    assert kinds >= {"scaled", "int32", "matmul", "quantize_rows", "grouped", "experts", "attention", "rows", "rotary"}
    # Elsewhere a program's part of shared memory is too small for it.
    assert ("linear" in kinds) == (target in ("sm_80", "sm_90", "sm_100", "gfx950"))
    assert any("streamk" in r["case"] for r in compiled)
    assert {"matmul float16", "matmul bfloat16", "matmul float32"} <= {r["case"] for r in compiled}


def test_fp8_compiles_where_there_is_fp8(results: list[Result]) -> None:
    for target in TARGETS:
        formats = {"matmul float8_e5m2"} if target == "sm_80" else {"matmul float8_e5m2", "matmul float8_e4m3fn"}
        assert {r["case"] for r in of(results, target, "matmul float8")} == formats


@EVERY_TARGET
def test_int8_products_run_on_tensor_cores(target: str, results: list[Result]) -> None:
    units = ["mfma"] if target.startswith("gfx") else ["wgmma", "mma_sync", "tcgen05"]
    for r in of(results, target, *INT8):
        assert any(r[unit] for unit in units), r["case"]


def test_hopper_gets_its_own_instructions_for_tiles_of_64_rows(results: list[Result]) -> None:
    for r in of(results, "sm_90", *INT8, "matmul float16", "matmul bfloat16"):
        if r["block_m"] >= 64:
            assert r["wgmma"], r["case"]
            assert not r["mma_sync"], r["case"]


def test_int4_goes_to_tensor_cores_through_registers(results: list[Result]) -> None:
    for r in of(results, "sm_90", "w4a8 hopper"):
        assert r["tma_load"], r["case"]
        assert bool(r["wgmma"]) == r["kernel"].startswith("_int4_int8_many"), r["case"]
        assert bool(r["wgmma"]) != bool(r["mma_sync"]), r["case"]


def test_stored_weights_are_multiplied_on_tensor_cores(results: list[Result]) -> None:
    for target in TARGETS:
        for r in of(results, target, "weight_only few"):
            assert r["mfma"] or r["mma_sync"] or r["wgmma"] or r["tcgen05"], r["case"]
    hopper = of(results, "sm_90", *(f"weight_only {what}" for what in ("few", "one", "sixteen", "tiles")))
    assert {r["kernel"] for r in hopper} == {"_few_rows_kernel", "_few_rows_ring_kernel", "_tiles_kernel"}
    for r in hopper:
        assert r["wgmma"] if r["kernel"] == "_tiles_kernel" else r["mma_sync"], r["case"]
        assert r["tma_load"] or r["kernel"] == "_few_rows_kernel", r["case"]


def test_hoppers_kernel_copies_by_descriptor_and_multiplies_from_shared_memory(results: list[Result]) -> None:
    for r in of(results, "sm_90", "hopper", "linear hopper", "grouped hopper"):
        assert all(r[name] for name in ("wgmma", "tma_load", "tma_store")), r["case"]
        assert not any(r[name] for name in ("mma_sync", "cp_async_16", "cp_async_narrow", "barriers_in_staging")), r
    assert not [r for r in results if r["target"] != "sm_90" and "hopper" in r["case"]]


@pytest.mark.parametrize(("target", "starts_early"), [("sm_80", False), ("sm_90", True), ("sm_100", True)])
def test_kernels_start_ahead_of_time_where_they_can(target: str, starts_early: bool, results: list[Result]) -> None:
    for r in of(
        results,
        target,
        "scaled tiles",
        "scaled persistent",
        "quantize_rows",
        "linear",
        "grouped",
        "experts",
        "attention",
        "rotary",
        "rows",
    ):
        assert bool(r["waits_for_previous"]) == starts_early, r["case"]


@EVERY_TARGET
def test_weights_of_experts_run_on_tensor_cores(target: str, results: list[Result]) -> None:
    for r in of(results, target, "experts weights"):
        assert any(r[unit] for unit in ("mfma", "wgmma", "mma_sync", "tcgen05")), r["case"]
        if target == "sm_90":
            assert bool(r["wgmma"]) == ("many" in r["case"])
            assert r["cp_async_16"]


def test_hoppers_kernels_of_experts_read_weights_as_they_are_stored(results: list[Result]) -> None:
    for r in of(results, "sm_90", "experts hopper", "experts several"):
        if r["kernel"] == "_few_tokens_kernel":
            assert all(r[name] for name in ("mma_sync", "cp_async_16")), r["case"]
            assert not r["cp_async_narrow"], r["case"]
        elif r["kernel"] not in ("_combine_kernel", "_list_pairs_kernel"):
            assert all(r[name] for name in ("wgmma", "tma_load", "tma_store")), r["case"]


@EVERY_TARGET
def test_half_precision_products_run_on_tensor_cores(target: str, results: list[Result]) -> None:
    attention = [r for r in of(results, target, "attention") if r["kernel"].startswith("_attend")]
    for r in [*of(results, target, "matmul float16", "matmul bfloat16"), *attention]:
        if r["case"].endswith("float32"):
            continue
        assert any(r[unit] for unit in ("mfma", "wgmma", "mma_sync", "tcgen05")), r["case"]


@pytest.mark.parametrize("target", NVIDIA)
def test_operands_are_copied_16_bytes_at_a_time(target: str, results: list[Result]) -> None:
    # Narrower copies would mean that the compiler lost sight of an alignment that the arguments have.
    for r in of(results, target, *INT8, "matmul", "attention"):
        if "hopper" in r["case"] or r["kernel"].startswith(("_combine", "_store")):
            continue
        # Rows of 512 float32 values leave registers for one block of keys: with one stage, nothing is copied ahead.
        assert r["cp_async_16" if r["stages"] > 1 else "load_16"], r["case"]
        # The scales of int8 keys and values, and the places of keys: a number each.
        assert not r["cp_async_narrow"] or r["kernel"].startswith("_attend"), r["case"]


@pytest.mark.parametrize("target", NVIDIA)
def test_rows_to_quantize_are_read_16_bytes_at_a_time(target: str, results: list[Result]) -> None:
    for r in of(
        results,
        target,
        "quantize_rows",
        "rows norm",
        "rows add",
        "rows activation",
        *(["linear hopper"] if target == "sm_90" else []),
    ):
        assert r["load_16"] >= 4, r["case"]
        # Two values to an instruction, where there is one for that: else a row takes twice the registers.
        if target != "sm_80" and "float16" in r["case"]:
            assert r["packed_max"], r["case"]


@EVERY_TARGET
def test_no_kernel_spills(target: str, results: list[Result]) -> None:
    # The cosine of a large angle has an array, in NVIDIA's library.
    found = [r for r in of(results, target) if r["case"] not in ("rotary angles", "rotary axes")]
    most = 16 if target == "sm_120" else 0  # bytes: four of its kernels keep an address or two on the stack
    assert not {r["case"]: r["spilled"] for r in found if r["spilled"] > most}


def test_products_of_fp8_are_computed_while_others_are_added(results: list[Result]) -> None:
    """The assembler has a warp wait for each product if it finds registers of sums written between two of them."""
    waits = {r["case"]: r["waits_more"] for r in of(results, "sm_90", "fp8") if "waits_more" in r}
    tiles = {f"fp8 blocks {tile}" for tile in ("layer 1024", "128x192", "layer of one launch 3072")}
    assert waits.keys() >= tiles
    assert not any(waits.values()), waits


def test_pages_are_read_as_far_ahead_as_other_caches(results: list[Result]) -> None:
    """With a load for the number of a page, Triton gives keys and values half as many buffers."""
    shared = {r["case"]: r["shared"] for r in of(results, "sm_90", "attention") if r["kernel"].startswith("_attend")}
    assert shared["attention tables"] == shared["attention 128 bfloat16"]


def test_slots_are_given_back_when_loads_of_them_have_ended(results: list[Result]) -> None:
    """The assembler lets loads end after an arrival at a barrier if what needs their values can come later, too."""
    found = [r for r in of(results, "sm_90") if "unfinished_loads" in r]
    many = {"_tiles_kernel", "_int4_int8_many_kernel", "_grouped_hopper_kernel", "_grouped_weight_hopper_kernel"}
    few = {f"_int4_int8_{rows}_kernel" for rows in ("few", "layer", "row")} | {"_few_rows_ring_kernel"}
    assert {r["kernel"] for r in found} >= many | few | {"_gemm_hopper_kernel", "_quant_linear_hopper_kernel"}
    assert not {r["case"]: r["unfinished_loads"] for r in found if r["unfinished_loads"]}


def test_no_product_s_operand_is_overwritten(results: list[Result]) -> None:
    found = [r for r in of(results, "sm_90") if "overwritten_operands" in r]
    assert {r["kernel"] for r in found} >= {"_tiles_kernel", "_int4_int8_many_kernel", "_grouped_weight_hopper_kernel"}
    assert not {r["case"]: r["overwritten_operands"] for r in found if r["overwritten_operands"]}


@EVERY_TARGET
def test_functions_of_a_norm_add_up_a_row_in_one_order(target: str, results: list[Result]) -> None:
    sums: dict[tuple[str, ...], list[list[str]]] = {}
    for r in of(results, target, "rows sum"):
        sums.setdefault(tuple(r["case"].split()[:4]), []).append(r["sums"])
    assert sums
    for case, layouts in sums.items():
        assert len(layouts) == 5
        assert len(layouts[0]) == 1, case
        assert layouts[1:] == layouts[:1] * 4, case


@EVERY_TARGET
def test_candidates_fit_in_shared_memory(target: str, results: list[Result]) -> None:
    limit = (DEVICES | CONSUMER)[target].shared_memory
    for r in of(results, target):
        assert r["shared"] <= limit, r["case"]


def test_int4_by_int8_takes_the_shared_memory_that_its_config_counts(results: list[Result]) -> None:
    found = [r for r in of(results, "sm_90", "w4a8 hopper") if " of " in r["case"]]
    assert {r["kernel"] for r in found} == {"_int4_int8_few_kernel", "_int4_int8_many_kernel"}
    for r in found:
        counted = int(r["case"].rpartition(" of ")[2])
        assert counted - RESERVED_BYTES < r["shared"] <= counted, r["case"]
