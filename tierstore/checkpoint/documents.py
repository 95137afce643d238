"""Zarr's metadata documents: those that are written, and what is read from those of others.

Written by hand, not through zarr's own classes, because a checkpoint of ten thousand parameters has forty
thousand. Read with suspicion: a document says what is allocated later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.checkpoint.entries import MOST_ELEMENTS, Json
from tierstore.checkpoint.geometry import Compression, Geometry
from tierstore.checkpoint.kinds import data_type, dtype_name, fill_value
from tierstore.errors import CheckpointValueError, DamagedCheckpointError

METADATA = "zarr.json"
MOST_BLOCK_BYTES = 128 << 20
MOST_BLOCKS = 1 << 32
ZSTD_LEVEL = 1

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_CHECKSUM = {"name": "crc32c"}


@dataclass(frozen=True, slots=True)
class ArrayNode:
    """An array as its document describes it. `key` is the name of the file of chunk 0, with {} for its number."""

    geometry: Geometry
    data_type: str
    key: str

    def file_of(self, shard: int) -> str:
        """The file of a shard, from the array's folder on."""
        return self.key.format(shard)


def dump(where: str, document: Mapping[str, Json], *, indent: int | None = None) -> bytes:
    """Write JSON, ASCII only. Raises CheckpointValueError for what JSON cannot hold."""
    try:
        return json.dumps(document, allow_nan=False, indent=indent).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointValueError(f"{where} cannot be stored as JSON: {error}") from error


def load(where: str, content: bytes) -> dict[str, Json]:
    """Read a JSON object. Raises DamagedCheckpointError for what is not JSON, not an object, or nested too deeply."""
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is not JSON that can be read: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{where} is a JSON {type(document).__name__}, not an object")
    return document


def group_document(attributes: Mapping[str, Json]) -> dict[str, Json]:
    """The document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def array_document(geometry: Geometry, dtype: torch.dtype) -> dict[str, Json]:
    """The document of an array of our own geometry."""
    codecs: list[Json] = [_LITTLE if geometry.itemsize > 1 else {"name": "bytes"}]
    if geometry.compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    codecs.append(_CHECKSUM)
    chunk = geometry.block_elements
    if geometry.shard_blocks:
        sharding = {
            "chunk_shape": [geometry.block_elements],
            "codecs": codecs,
            "index_codecs": [_LITTLE, _CHECKSUM],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        chunk *= geometry.shard_blocks
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [geometry.elements],
        "data_type": data_type(dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill_value(dtype),
        "codecs": codecs,
        "attributes": {"dtype": dtype_name(dtype)},
        "dimension_names": ["element"],
        "storage_transformers": [],
    }


def consolidated(root: Mapping[str, Json], nodes: Mapping[str, Json]) -> dict[str, Json]:
    """The root's document with those of all nodes below it, so that opening reads one file."""
    return {**root, "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": dict(nodes)}}


def group_attributes(where: str, document: Mapping[str, Json]) -> dict[str, Json]:
    """The attributes of a group. Raises DamagedCheckpointError if it is none."""
    attributes = document.get("attributes", {})
    is_group = document.get("zarr_format") == 3 and document.get("node_type") == "group"
    if not is_group or not isinstance(attributes, dict):
        raise DamagedCheckpointError(f"{where} is not a group of Zarr format 3")
    return attributes


def parse_array(where: str, document: Mapping[str, Json], elements: int, dtype: torch.dtype) -> ArrayNode:
    """Read how a 1-D array of `elements` of `dtype` is stored, by us or re-chunked by another tool.

    Raises DamagedCheckpointError for anything else, and for codecs that are not bytes, zstd, crc32c and sharding.
    """
    try:
        return _parse_array(document, elements, dtype)
    except (KeyError, TypeError, IndexError, AttributeError, _UnreadableError) as error:
        reason = str(error) if isinstance(error, _UnreadableError) else f"not an array's ({error!r})"
        raise DamagedCheckpointError(f"{where}: its metadata is {reason}") from error


class _UnreadableError(Exception):
    """Says what is wrong with a document."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_array(document: Mapping[str, Json], elements: int, dtype: torch.dtype) -> ArrayNode:
    _expect("zarr_format", document["zarr_format"], 3)
    _expect("node_type", document["node_type"], "array")
    _expect("shape", document["shape"], [elements])
    _expect("data_type", document["data_type"], data_type(dtype))
    _expect("chunk_grid", document["chunk_grid"]["name"], "regular")
    _expect("storage_transformers", document.get("storage_transformers", []), [])
    chunk = _extent("chunk_shape", document["chunk_grid"]["configuration"]["chunk_shape"])
    codecs = document["codecs"]
    sharding: Mapping[str, Json] | None = None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        sharding = codecs[0]["configuration"]
        codecs = sharding["codecs"]
    compression, has_checksum = _codecs(codecs, dtype.itemsize)
    block = chunk if sharding is None else _extent("inner chunk_shape", sharding["chunk_shape"])
    if chunk % block:
        raise _UnreadableError(f"shards of {chunk} elements in chunks of {block}")
    geometry = Geometry(
        elements,
        dtype.itemsize,
        block,
        0 if sharding is None else chunk // block,
        compression,
        has_checksum,
        sharding is not None and _is_index_first(sharding),
        sharding is None or _has_index_checksum(sharding["index_codecs"]),
    )
    if geometry.block_bytes > MOST_BLOCK_BYTES:
        raise _UnreadableError(f"in chunks of {geometry.block_bytes:,} bytes, more than {MOST_BLOCK_BYTES:,}")
    if max(geometry.blocks, geometry.shard_blocks) > MOST_BLOCKS or geometry.index_bytes > MOST_BLOCK_BYTES:
        raise _UnreadableError(f"in {max(geometry.blocks, geometry.shard_blocks):,} chunks, too many")
    return ArrayNode(geometry, document["data_type"], _key(document["chunk_key_encoding"]))


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted or type(found) is not type(wanted):
        raise _UnreadableError(f"of {what} {str(found)[:100]}, not {wanted}")


def _extent(what: str, values: object) -> int:
    if not isinstance(values, list) or len(values) != 1 or type(values[0]) is not int:
        raise _UnreadableError(f"of {what} {str(values)[:100]}, not one number")
    if not 1 <= values[0] <= MOST_ELEMENTS:
        raise _UnreadableError(f"of {what} {values[0]}, out of range")
    return int(values[0])


def _codecs(codecs: Any, itemsize: int) -> tuple[Compression, bool]:
    """Which of the codecs that are read here a chain has: bytes, then perhaps zstd, then perhaps crc32c."""
    names = [codec["name"] for codec in codecs]
    if names[:1] != ["bytes"] or names[1:] not in ([], ["zstd"], ["crc32c"], ["zstd", "crc32c"]):
        raise _UnreadableError(f"of codecs {names}; read here are bytes, zstd and crc32c, in this order, and sharding")
    if itemsize > 1:
        _expect("endian", codecs[0]["configuration"]["endian"], "little")
    return "zstd" if "zstd" in names else "none", "crc32c" in names


def _is_index_first(sharding: Mapping[str, Json]) -> bool:
    location = sharding.get("index_location", "end")
    if location not in ("start", "end"):
        raise _UnreadableError(f"of index_location {location!r}")
    return bool(location == "start")


def _has_index_checksum(codecs: Any) -> bool:
    compression, has_checksum = _codecs(codecs, 8)
    if compression != "none":
        raise _UnreadableError("of a compressed shard index")
    return has_checksum


def _key(encoding: Mapping[str, Json]) -> str:
    name = encoding["name"]
    default = {"default": "/", "v2": "."}
    if name not in default:
        raise _UnreadableError(f"of chunk_key_encoding {name!r}")
    separator = encoding.get("configuration", {}).get("separator", default[name])
    if separator not in ("/", "."):
        raise _UnreadableError(f"of separator {separator!r}")
    return f"c{separator}{{}}" if name == "default" else "{}"
