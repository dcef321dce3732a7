"""The functions that the kernels are compared with, written with torch's own operations: a file a family."""

import attention
import copies
import fp8
import gemm
import mxfp8
import nvfp4

PEERS = {name: peer for family in (copies, fp8, mxfp8, nvfp4, gemm, attention) for name, peer in family.PEERS.items()}
