"""What ``qgemm inspect`` tells of a checkpoint beside its layers, and of layers that others put together."""

from __future__ import annotations

from pathlib import Path

from checkpoint.quark_layers import write_gpt_oss
from checkpoint.samples import SAMPLES

from cli.command import run, run_json


def test_what_a_checkpoint_asks_for_and_qgemm_leaves_out_is_a_note() -> None:
    shown = run("inspect", SAMPLES / "nvfp4-modelopt").stdout
    assert shown.startswith("modelopt (NVFP4), LlamaForCausalLM\n")
    assert "qgemm loads it\nnote: activations stay in float, where the checkpoint asks for fp4\n" in shown


def test_an_adapter_beside_the_weights_is_told_of(int8_folder: Path, float_folder: Path) -> None:
    for folder in (int8_folder, float_folder):
        (folder / "adapter_config.json").write_text("{}")
    found = run_json("inspect", int8_folder)
    assert (found["loads"], found["problems"]) == (True, [])
    assert found["notes"] == ["it has an adapter, adapter_config.json: add it with load_adapter of the model"]
    assert "has an adapter, adapter_config.json, which" in run_json("inspect", float_folder)["refusal"]
    (float_folder / "model.safetensors").rename(float_folder / "adapter_model.safetensors")
    assert "has no model.safetensors. It is an adapter of PEFT" in run_json("inspect", float_folder)["refusal"]


def test_layers_that_the_model_has_under_other_names_have_their_scheme(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)  # gates and ups are one layer in the files, and two in the model
    found = {layer["name"].rpartition(".")[2]: layer for layer in run_json("inspect", tmp_path)["layers"]}
    assert [found[name]["scheme"] for name in ("gate_up_proj", "down_proj", "q_proj")] == ["mxfp4", "mxfp4", None]
    assert "mxfp4" in next(line for line in run("inspect", tmp_path).stdout.splitlines() if "gate_up_proj" in line)


def test_a_generation_config_that_no_load_accepts_is_a_problem(int8_folder: Path, float_folder: Path) -> None:
    for folder in (int8_folder, float_folder):
        (folder / "generation_config.json").write_text("[]")
        found = run_json("inspect", folder, exit_code=1)
        assert not found["loads"]
        assert "generation_config.json holds a JSON list; it must be an object" in found["problems"][0]
