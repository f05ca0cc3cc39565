"""Reading one checkpoint: whole tensors, or any flat range of any slice, whatever layout wrote it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from training.checkpoint_manifest import MANIFEST, Box, Entry, Manifest, box_size, in_model_order, whole
from training.tensor_file import CheckpointError, TensorFile, file_checksum


class Checkpoint:
    """One checkpoint, open for reading. Tensors come as float32 on the CPU, whole or in any slice."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._boxes: dict[tuple[str, str], dict[Box, list[Entry]]] = {}
        for entry in sorted(manifest.entries, key=lambda entry: entry.offset):
            self._boxes.setdefault((entry.name, entry.kind), {}).setdefault(entry.box, []).append(entry)
        self._files: dict[str, TensorFile] = {}

    @classmethod
    def open(cls, path: Path | str, verify: bool = True) -> Self:
        """Opens the checkpoint folder `path`. CheckpointError, naming the file, where anything of it is damaged.

        Sizes are always checked; `verify` also reads every file and compares checksums.
        """
        path = Path(path)
        checkpoint = cls(path, Manifest.load(path / MANIFEST))
        for report in checkpoint.damage(checksums=verify):
            raise CheckpointError(report)
        return checkpoint

    def damage(self, files: Sequence[str] | None = None, checksums: bool = True) -> list[str]:
        """One sentence for each damaged file among `files` (default all), so that ranks can share the reading."""
        names = list(self.manifest.files) if files is None else files
        with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter's lock
            found = pool.map(lambda name: self._damage_of(name, checksums), names)
            return [report for report in found if report]

    def _damage_of(self, name: str, checksums: bool) -> str | None:
        path, expected = self.path / name, self.manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                return f"{path} has {size} bytes where the manifest says {expected['size']}"
            if checksums and file_checksum(path) != expected["checksum"]:
                return f"{path} is damaged: its checksum is not the manifest's"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        return None

    def names(self) -> list[str]:
        """The global parameter names, numbers in numeric order."""
        return in_model_order({name for name, _ in self._boxes})

    def kinds(self) -> set[str]:
        """{"weight"} alone where there are no moments (weights that came from elsewhere)."""
        return {kind for _, kind in self._boxes}

    def shape(self, name: str) -> tuple[int, ...]:
        """The true global shape of a parameter."""
        return next(iter(self._find(name, "weight").values()))[0].global_shape

    def read(self, name: str, kind: str = "weight") -> Tensor:
        """The whole tensor in its global shape."""
        shape = self.shape(name)
        box = whole(shape)
        return self.read_range(name, kind, box, 0, box_size(box)).view(shape)

    def read_range(self, name: str, kind: str, box: Box, offset: int, length: int) -> Tensor:
        """Elements offset to offset + length of the flattened slice `box` of a tensor: 1-D.

        Where the checkpoint was written with the same slices, just these ranges are read. Otherwise the rows of the
        stored slices that overlap the wanted rows are read, one stored slice at a time.
        """
        boxes = self._find(name, kind)
        box = tuple((int(start), int(stop)) for start, stop in box)
        shape = self.shape(name)
        if len(box) != len(shape) or not all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
            raise ValueError(f"slice {box} lies outside {name} with shape {shape}")
        if not 0 <= offset <= offset + length <= box_size(box):
            raise ValueError(f"range {offset}:{offset + length} lies outside slice {box} of {name}")
        if length == 0:
            return torch.empty(0)
        if box in boxes:
            return self._read_flat(boxes[box], offset, offset + length)
        # Narrow the wanted slice to the rows that the range touches, and fill that from every overlapping stored slice.
        row = box_size(box[1:])
        first = offset // row
        wanted = ((box[0][0] + first, box[0][0] + -(-(offset + length) // row)), *box[1:])
        result = torch.empty([stop - start for start, stop in wanted])
        for stored, entries in boxes.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, stored, strict=True))
            if any(start >= stop for start, stop in common):
                continue
            top, bottom = common[0][0] - stored[0][0], common[0][1] - stored[0][0]
            stored_row = box_size(stored[1:])
            rows = self._read_flat(entries, top * stored_row, bottom * stored_row)
            rows = rows.view(bottom - top, *(stop - start for start, stop in stored[1:]))
            inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common[1:], stored[1:], strict=True))
            target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, wanted, strict=True))
            result[target] = rows[(slice(None), *inner)]
            del rows  # before the next stored slice is read
        start = offset - first * row
        flat = result.reshape(-1)[start : start + length]
        return flat if flat.numel() == result.numel() else flat.clone()

    def _find(self, name: str, kind: str) -> dict[Box, list[Entry]]:
        if (name, kind) not in self._boxes:
            raise CheckpointError(f"{self.path / MANIFEST} has no {name}/{kind}")
        return self._boxes[name, kind]

    def _read_flat(self, entries: list[Entry], start: int, stop: int) -> Tensor:
        """Elements of one stored slice, joined from its pieces (sorted by offset)."""
        parts = []
        for entry in entries:
            low, high = max(start, entry.offset), min(stop, entry.offset + entry.length)
            if low < high:
                parts.append(self._read_piece(entry, low - entry.offset, high - entry.offset))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_piece(self, entry: Entry, start: int, stop: int) -> Tensor:
        if entry.file not in self._files:
            self._files[entry.file] = TensorFile(self.path / entry.file)
        file = self._files[entry.file]
        spec = file.specs.get(entry.tensor)
        if spec is None or spec.dtype != torch.float32 or spec.shape != (entry.length,):
            raise CheckpointError(f"{file.path} does not hold {entry.tensor} as the manifest says")
        return file.read(entry.tensor, start, stop)

    def close(self) -> None:
        """Closes the files that reading opened."""
        for file in self._files.values():
            file.close()
        self._files.clear()
