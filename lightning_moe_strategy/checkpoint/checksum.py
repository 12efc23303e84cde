"""CRC-32 of a checkpoint's bytes: by ISA-L where there is a build of it, else by zlib. Both give the same number.

52 and 4.2 GB/s on one core (AMD EPYC with AVX512, isal 1.9.1, zlib of Python 3.11, 1 MB at a time).
"""

try:
    from isal.isal_zlib import crc32
except ImportError:  # no build for this platform
    from zlib import crc32

__all__ = ["crc32"]
