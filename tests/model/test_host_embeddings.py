"""Tables of embeddings in the host's memory: the same bits, less of the GPU's memory."""

import gc

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qgemm
from qgemm.model import host_embeddings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS, COLUMNS = 2**14, 1024  # 32 MB in 16 bits


def model_of(*modules, dtype=torch.bfloat16):
    return nn.Sequential(*modules).to("cuda", dtype)


def test_a_model_on_the_cpu_has_nothing_to_offload():
    with pytest.raises(ValueError, match="no embeddings on a GPU"):
        qgemm.offload_embeddings(nn.Sequential(nn.Embedding(4, 4)))


def test_a_model_without_embeddings():
    with pytest.raises(ValueError, match="no embeddings on a GPU"):
        qgemm.offload_embeddings(nn.Linear(4, 4))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_are_the_same_and_the_memory_is_free(dtype):
    model = model_of(nn.Embedding(ROWS, COLUMNS), dtype=dtype)
    indices = torch.randint(ROWS, (8, 64), device="cuda")
    expected, values = model(indices), model[0].weight.detach().cpu()
    size = model[0].weight.nbytes
    before = torch.cuda.memory_allocated()
    assert qgemm.offload_embeddings(model) == size
    assert before - torch.cuda.memory_allocated() >= size
    assert model[0].weight.is_cuda
    assert model[0].weight.shape == (ROWS, COLUMNS)
    assert torch.equal(model(indices), expected)
    assert torch.equal(model[0].weight.detach().cpu(), values)
    assert qgemm.offload_embeddings(model) == 0  # again: nothing is left to do
    assert torch.equal(torch.compile(model, fullgraph=True)(indices), expected)


@needs_gpu
def test_a_graph_reads_the_host():
    model = model_of(nn.Embedding(ROWS, COLUMNS))
    qgemm.offload_embeddings(model)
    indices = torch.zeros(8, dtype=torch.long, device="cuda")
    model(indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(indices)
    indices.copy_(torch.arange(8))
    graph.replay()
    assert torch.equal(out, model[0].weight[:8])


@needs_gpu
def test_memory_is_unlocked_with_the_table():
    model = model_of(nn.Embedding(ROWS, COLUMNS))
    expected = model[0].weight.detach().clone()
    qgemm.offload_embeddings(model)
    assert len(host_embeddings._locked) == 1
    model[0].weight.data = model[0].weight.data.clone()
    gc.collect()
    assert not host_embeddings._locked
    assert torch.equal(model[0].weight, expected)
    qgemm.offload_embeddings(model)
    model.cpu()
    gc.collect()
    assert not host_embeddings._locked
    assert torch.equal(model[0].weight, expected.cpu())


@needs_gpu
def test_a_table_that_others_read_stays():
    head = nn.Linear(COLUMNS, ROWS, bias=False)
    model = model_of(nn.Embedding(ROWS, COLUMNS), head)
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match=r"'0' stayed on the GPU.* Give a tied output head one of its own"):
        assert qgemm.offload_embeddings(model) == 0
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    assert qgemm.offload_embeddings(model) == model[0].weight.nbytes


@needs_gpu
def test_tables_that_share_a_weight_are_moved_together():
    model = model_of(nn.Embedding(ROWS, COLUMNS), nn.Embedding(ROWS, COLUMNS))
    model[1].weight = model[0].weight
    assert qgemm.offload_embeddings(model) == model[0].weight.nbytes
    assert model[1].weight is model[0].weight


@needs_gpu
def test_small_tables_stay():
    model = model_of(nn.Embedding(64, 64))
    address = model[0].weight.data_ptr()
    assert qgemm.offload_embeddings(model) == 0
    assert model[0].weight.data_ptr() == address


@needs_gpu
def test_memory_that_cannot_be_locked(monkeypatch):
    model = model_of(nn.Embedding(ROWS, COLUMNS))
    address = model[0].weight.data_ptr()

    class Runtime:
        cudaHostRegister = staticmethod(lambda address, size, flags: 2)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(RuntimeError, match=r"couldn't lock 0\.03 GB"):
        qgemm.offload_embeddings(model)
    assert model[0].weight.data_ptr() == address


@needs_gpu
def test_generate_and_files(tmp_path):
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=1024, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    qgemm.fast_generate(qgemm.quantize_model(model, fuse=True, progress=False))
    prompt = torch.randint(ROWS, (2, 16), device="cuda")
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False)
    assert qgemm.offload_embeddings(model) == ROWS * COLUMNS * 2
    assert torch.equal(model.generate(prompt, max_new_tokens=16, do_sample=False), expected)
    qgemm.save_quantized(model, tmp_path)
    loaded = qgemm.load_quantized(tmp_path, device="cuda")
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
