"""Whole models of transformers, with random weights: ``python -m benchmarks.models --help``.

Prefill, decode at several batches and contexts, requests served at once, the time to the first token and memory, of
bf16 and quantized models, side by side. Each provider of a decoder runs in a process of its own, so that memory and
first calls are its own; encoders take turns in one process. Outputs are compared with the float model's before anything
is timed, served tokens with the model's own forward afterwards.
"""
