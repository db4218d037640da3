"""The limits of devices that kernels are chosen, planned and compiled for, whatever runs the tests."""

from qgemm.kernels.launch.device import DeviceLimits

A100 = DeviceLimits(num_sms=108, shared_memory=166_912)
H200 = DeviceLimits(num_sms=132, shared_memory=232_448, hopper=True, pdl=True, rounds_fp8=True, multiplies_fp8=True)
B200 = DeviceLimits(num_sms=148, shared_memory=232_448, pdl=True, rounds_fp8=True, multiplies_fp8=True)
MI300X = DeviceLimits(num_sms=304, shared_memory=65_536, warp_size=64, num_xcds=8, multiplies_fp8=True)
MI355X = DeviceLimits(num_sms=256, shared_memory=163_840, warp_size=64, num_xcds=8, multiplies_fp8=True)
RTX_3090 = DeviceLimits(num_sms=82, shared_memory=101_376, max_threads=1536)
RTX_4090 = DeviceLimits(num_sms=128, shared_memory=101_376, max_threads=1536, rounds_fp8=True, multiplies_fp8=True)
RTX_5090 = DeviceLimits(
    num_sms=170, shared_memory=101_376, max_threads=1536, pdl=True, rounds_fp8=True, multiplies_fp8=True
)
