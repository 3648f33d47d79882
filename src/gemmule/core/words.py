"""The strings and numbers that options take, as types: a type checker finds a wrong one."""

from __future__ import annotations

from typing import Literal, TypeAlias

Op: TypeAlias = Literal["matvec", "vecmat", "matmul"]
Precision: TypeAlias = Literal["float32", "float64", "ieee", "tf32"]
Accumulate: TypeAlias = Literal["float16"]
Activations: TypeAlias = Literal["float", "int8"]
Bits: TypeAlias = Literal[4, 8]
ScaleDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
Method: TypeAlias = Literal["rtn", "mse", "hqq", "gptq"]
Float4: TypeAlias = Literal["mxfp4", "nvfp4"]
