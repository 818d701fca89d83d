"""The frame of a TFRecord, in which TensorBoard's events are stored too: lengths and checksums."""

import functools
import struct

import numpy as np

BLOCK = 4096  # bytes of which the checksum is computed at once


def format_record(content: bytes) -> bytes:
    """Returns a TFRecord: the length, the content, and a checksum of each."""
    header = struct.pack("<Q", len(content))
    checksums = [mask_checksum(crc32c(np.frombuffer(data, np.uint8)[None]))[0] for data in (header, content)]
    return b"".join([header, struct.pack("<I", checksums[0]), content, struct.pack("<I", checksums[1])])


def mask_checksum(crc: np.ndarray) -> np.ndarray:
    """Returns the checksums as TFRecords store them: rotated, plus a constant."""
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def crc32c(rows: np.ndarray) -> np.ndarray:
    """Returns the CRC-32C of each row of bytes: the XOR of the contributions of its bytes, by distance from the end."""
    tables = _crc_tables()
    state = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK].copy()
        length = block.shape[1]
        lead = min(4, length)
        block[:, :lead] ^= state.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :lead]
        rest = state >> np.uint32(8 * lead) if lead < 4 else np.zeros_like(state)
        state = rest ^ np.ufunc.reduce(np.bitwise_xor, tables[np.arange(length)[::-1], block], axis=1)
    return state ^ np.uint32(0xFFFFFFFF)


@functools.cache
def _crc_tables() -> np.ndarray:
    """Returns the contribution to a CRC-32C by [distance from the end, byte]."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> np.uint32(1)) ^ np.uint32(0x82F63B78), first >> np.uint32(1))
    tables = [first.astype(np.uint32)]
    for _ in range(BLOCK - 1):
        tables.append((tables[-1] >> np.uint32(8)) ^ first[tables[-1] & np.uint32(0xFF)])
    return np.stack(tables).astype(np.uint32)
