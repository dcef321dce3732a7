"""The functions that the kernels are compared with, written with torch's own operations: a file a family."""

import attention
import copies
import fp8
import gemm
import mxfp8
import nvfp4
import training

PEERS = {name: peer for family in (copies, fp8, mxfp8, nvfp4, gemm, attention, training) for name, peer in family.PEERS.items()}
