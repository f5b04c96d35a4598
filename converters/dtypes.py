"""One table of element types: our name, item size, and what each file format calls it."""

from __future__ import annotations

from dataclasses import dataclass

from converters.errors import FormatError, RequestError, UnsupportedError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: The name torch uses, without `torch.`: `bfloat16`.
        itemsize: Bytes per element.
        safetensors: Name in a safetensors header, None where that format has none.
        storage: Class name that torch.save pickles for a storage of this type.
        short: What tables print.
    """

    name: str
    itemsize: int
    safetensors: str | None
    storage: str | None
    short: str

    @property
    def floating(self) -> bool:
        """Whether values are real floating point numbers, so that casts between such types make sense."""
        return self.name.startswith(("float", "bfloat"))

    def __str__(self) -> str:
        return self.name


# safetensors names: the format's `Dtype` enumeration; storages: torch/storage.py, written by torch.save since 1.6
TYPES = [
    DType("float64", 8, "F64", "DoubleStorage", "fp64"),
    DType("float32", 4, "F32", "FloatStorage", "fp32"),
    DType("float16", 2, "F16", "HalfStorage", "fp16"),
    DType("bfloat16", 2, "BF16", "BFloat16Storage", "bf16"),
    DType("float8_e4m3fn", 1, "F8_E4M3", None, "fp8e4m3"),
    DType("float8_e5m2", 1, "F8_E5M2", None, "fp8e5m2"),
    DType("float8_e4m3fnuz", 1, None, None, "fp8e4m3fnuz"),
    DType("float8_e5m2fnuz", 1, None, None, "fp8e5m2fnuz"),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None, "fp8e8m0"),
    DType("int64", 8, "I64", "LongStorage", "i64"),
    DType("int32", 4, "I32", "IntStorage", "i32"),
    DType("int16", 2, "I16", "ShortStorage", "i16"),
    DType("int8", 1, "I8", "CharStorage", "i8"),
    DType("uint8", 1, "U8", "ByteStorage", "u8"),
    DType("uint16", 2, "U16", None, "u16"),
    DType("uint32", 4, "U32", None, "u32"),
    DType("uint64", 8, "U64", None, "u64"),
    DType("bool", 1, "BOOL", "BoolStorage", "bool"),
    DType("complex64", 8, "C64", "ComplexFloatStorage", "c64"),
    DType("complex128", 16, None, "ComplexDoubleStorage", "c128"),
]
"""Every element type there is."""
_BY_NAME = {t.name: t for t in TYPES}
_BY_STORAGE = {t.storage: t for t in TYPES if t.storage}
_BY_SAFETENSORS = {t.safetensors: t for t in TYPES if t.safetensors}
_NOT_READ = ("F4", "F6_E2M3", "F6_E3M2")  # of safetensors 0.6 and later
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_OPTIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype(name: str) -> DType:
    """The type torch calls `name` (with or without `torch.`).

    Raises:
        UnsupportedError: No such type here.
    """
    bare = name.removeprefix("torch.")
    kind = _BY_NAME.get(_ALIASES.get(bare, bare))
    if kind is None:
        raise UnsupportedError(f"unknown element type {name!r}", details=[f"known: {', '.join(_BY_NAME)}"])
    return kind


def from_storage(name: str) -> DType | None:
    """The type of a storage class that torch.save names (`BFloat16Storage`); None for an untyped or unknown one."""
    return _BY_STORAGE.get(name)


def from_safetensors(name: str) -> DType:
    """The type a safetensors header calls `name` (`BF16`).

    Raises:
        FormatError: No such type.
        UnsupportedError: One whose elements are less than a byte.
    """
    element_type = _BY_SAFETENSORS.get(name)
    if element_type is None:
        kind = UnsupportedError if name in _NOT_READ else FormatError
        raise kind(f"unknown safetensors element type {name!r}")
    return element_type


def from_option(text: str) -> DType:
    """The floating type a person asks for: `bf16`, `float32`, `torch.float16`.

    Raises:
        RequestError: Not a floating type that can be cast to.
    """
    name = _OPTIONS.get(text.lower(), text.lower().removeprefix("torch."))
    if name not in _OPTIONS.values():
        raise RequestError(f"cannot cast to {text!r}", hint="choose one of bf16, fp16, fp32")
    return _BY_NAME[name]
