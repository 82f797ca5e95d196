"""Computes the bytes that a compiled program moves, from the instructions in its text.

A compiler's own cost analysis counts a loop's body once and is missing on GPUs. Here a body counts
as often as it runs, if its condition shows how often. Bytes are those of the operands and results
of each scheduled instruction, in the compiler's layout, with the padding of its tiles. For a slice
or an update in place, only the part that is accessed counts. For a conditional, the largest branch
counts, except for the second turn of a round, which runs only if a client is not finite
(``fedjax_lab.clients.finite``).
"""

import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16}
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "iota", "copy-done", "async-done"),
    *("all-reduce-done", "all-gather-done", "collective-permute-done", "send-done", "recv-done"),
    "slice-start",  # its bytes count when it is done
}
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
# The scope of the choice whether a cohort runs again: its second turn is skipped.
UNLESS_FINITE = "unless_finite"
SKIPPED = 0.5
_SLICES = ("dynamic-slice", "slice", "gather")


class Collectives(NamedTuple):
    """Collectives of one kind.

    Attributes:
      kind: name of the operation, such as "all-reduce".
      times: number of them in a call of the program.
      bytes: total bytes of their results on one device.
    """

    kind: str
    times: int
    bytes: int


class Traffic(NamedTuple):
    """The bytes that a program moves in one call, on one device.

    Attributes:
      bytes_accessed: bytes read and written.
      collectives: collectives by kind.
      unknown_loops: loops whose length the program does not show; their bodies count once.
    """

    bytes_accessed: int
    collectives: tuple[Collectives, ...]
    unknown_loops: int


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
      name: name of its result.
      type: type of its result, as text.
      opcode: name of the operation, such as "fusion".
      operands: names of the operands.
      rest: text after the operands: attributes and metadata.
      is_root: whether its result is the computation's result.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool


def read_traffic(text: str) -> Traffic:
    """Compute the bytes that a compiled program moves, from its text.

    Args:
      text: ``compiled.as_text()``, scheduled HLO.

    Raises:
      ValueError: the text has no entry computation.
    """
    return Reader(text).traffic()


def shape_bytes(type: str, padded: bool = True) -> int:
    """Compute the bytes of a value of an HLO type, ``f32[10,64]{1,0:T(8,128)}`` or a tuple.

    Args:
      type: the text of the type.
      padded: include the padding of the layout's first tile.
    """
    total = 0.0
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,<=]*)\](\{[^{}]*\})?", type):
        if dtype in ("token", "opaque"):
            continue
        sizes = [int(d) for d in re.findall(r"\d+", dims)]
        order = re.match(r"\{([\d,]*)", layout or "")
        tile = re.search(r"T\(([\d,]+)\)", layout or "")
        if padded and tile and order and order[1]:
            minor_last = [sizes[int(d)] for d in reversed(order[1].split(","))]
            steps = [int(n) for n in tile[1].split(",")]
            minor_last = [1] * (len(steps) - len(minor_last)) + minor_last
            for place, step in enumerate(reversed(steps), 1):
                minor_last[-place] = -(-minor_last[-place] // step) * step
            sizes = minor_last
        total += math.prod(sizes) * _itemsize(dtype)
    return math.ceil(total)


def _itemsize(dtype: str) -> float:
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0


class Reader:
    """Sums the bytes that a compiled program moves; a subclass may count others in ``step``.

    Args:
      text: as in ``read_traffic``.

    Raises:
      ValueError: the text has no entry computation.
    """

    def __init__(self, text: str):
        self._computations: dict[str, dict[str, Instruction]] = {}
        entry = current = None
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{$", line):
                current = self._computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif current is not None and (found := _parse(line)):
                current[found.name] = found
        if entry is None:
            raise ValueError("the text has no ENTRY computation; it must be scheduled HLO.")
        self._entry = entry
        self._found: dict[str, list[float]] = {}
        self._unknown = 0

    def traffic(self) -> Traffic:
        """Read the program; call it once for each reader."""
        moved = self.run(self._entry, 1)
        kinds = tuple(
            Collectives(kind, *map(round, found)) for kind, found in sorted(self._found.items())
        )
        return Traffic(round(moved), kinds, self._unknown)

    def run(self, name: str, times: float) -> float:
        """Compute the bytes that a computation accesses, and record its collectives.

        Args:
          name: name of the computation.
          times: number of runs.
        """
        body = self._computations.get(name, {})
        return sum(self.step(body, instruction, times) for instruction in body.values())

    def step(self, body: dict[str, Instruction], instruction: Instruction, times: float) -> float:
        """Compute the bytes that an instruction accesses, including computations that it calls.

        Args:
          body: the instructions of its computation, by name.
          instruction: one of them.
          times: number of runs.
        """
        opcode = instruction.opcode
        if opcode in _FREE:
            return 0
        if opcode == "while":
            trips = self._trips(instruction)
            self._unknown += trips is None
            return self.run(called(instruction, "body"), times * (1 if trips is None else trips))
        if opcode == "conditional":
            inner = re.findall(
                r"(?:branch_computations=\{|_computation=)([^},]*)", instruction.rest
            )
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
            names = branches[1].split(",") if branches else inner
            again = re.search(rf"{UNLESS_FINITE}/cond\b(?!/)", instruction.rest)
            turns = SKIPPED if again else 1
            return self.largest([n.strip().lstrip("%") for n in names], times * turns)
        if opcode in ("call", "async-start"):
            return self.run(called(instruction, "to_apply") or called(instruction, "calls"), times)
        kind = opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            found = self._found.setdefault(kind, [0, 0])
            found[0] += times
            found[1] += times * _received(instruction)
        if opcode == "fusion":
            return times * self._fusion(body, instruction)
        result = shape_bytes(instruction.type)
        if opcode.removesuffix("-done") in _SLICES:
            return times * 2 * result
        if opcode == "custom-call" and 'custom_call_target="ConcatBitcast"' in instruction.rest:
            return 0  # a TPU's name for pieces that are already adjacent
        if opcode == "dynamic-update-slice":
            return times * 2 * self._size(body, instruction.operands[1])
        if opcode == "copy-start":
            return times * 2 * self._size(body, instruction.operands[0])
        return times * (result + sum(self._size(body, name) for name in instruction.operands))

    def largest(self, names: list[str], times: float) -> float:
        """Return the bytes of the branch that moves most, and record its collectives only.

        Args:
          names: names of the branches' computations.
          times: number of runs.
        """
        before = {kind: list(found) for kind, found in self._found.items()}
        best, kept = 0.0, before
        for name in names:
            self._found = {kind: list(found) for kind, found in before.items()}
            moved = self.run(name, times)
            if moved >= best:
                best, kept = moved, self._found
        self._found = kept
        return best

    def _size(self, body, name: str) -> int:
        return shape_bytes(body[name].type) if name in body else 0

    def _fusion(self, body, instruction: Instruction) -> int:
        """Compute a fusion's bytes: what its body reads of the operands, and its results."""
        inner = self._computations.get(called(instruction, "calls"), {})
        moved = self._written(inner, instruction)
        for index, name in enumerate(instruction.operands):
            part = self._read(inner, index)
            moved += self._size(body, name) if part is None else part
        return moved

    def _written(self, inner, instruction: Instruction) -> int:
        root = next((i for i in inner.values() if i.is_root), None)
        if root is None:
            return shape_bytes(instruction.type)
        parts = root.operands if root.opcode == "tuple" else (root.name,)
        total = 0
        for name in parts:
            last = inner.get(name)
            while last is not None and last.opcode == "bitcast":
                last = inner.get(last.operands[0])
            if last is None:
                continue
            update = last.opcode == "dynamic-update-slice"
            total += self._size(inner, last.operands[1]) if update else shape_bytes(last.type)
        return total

    def _read(self, inner, index: int) -> int | None:
        """Compute the bytes that a fusion reads of an operand; None: the complete operand."""
        names = [i.name for i in inner.values() if _is_parameter(i, index)]
        total = 0
        while names:
            name = names.pop()
            for user in inner.values():
                if name not in user.operands:
                    continue
                if user.opcode == "bitcast":
                    names.append(user.name)
                elif user.opcode in _SLICES and user.operands[0] == name:
                    total += shape_bytes(user.type)
                elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                    pass  # updated in place
                elif user.opcode == "fusion":
                    inside = self._computations.get(called(user, "calls"), {})
                    for place in (p for p, n in enumerate(user.operands) if n == name):
                        part = self._read(inside, place)
                        if part is None:
                            return None
                        total += part
                else:
                    return None
        return total

    def _trips(self, loop: Instruction) -> int | None:
        """Return how often a loop's body runs; None if that depends on values."""
        if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"\}', loop.rest):
            return int(known[1])
        condition = self._computations.get(called(loop, "condition"), {})
        root = next((i for i in condition.values() if i.is_root), None)
        if root is not None and root.opcode == "fusion":
            inner = self._computations.get(called(root, "calls"), {})
            condition = {**condition, **inner}
            root = next((i for i in inner.values() if i.is_root), None)
        bounds = [
            int(i.operands[0])
            for i in condition.values()
            if i.opcode == "constant" and i.operands and i.operands[0].isdigit()
        ]
        is_count = root is not None and root.opcode == "compare" and "direction=LT" in root.rest
        return bounds[0] if is_count and len(bounds) == 1 else None


def _parse(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    type, rest = rest[:end], rest[end:].lstrip()
    opcode, opening, _ = rest.partition("(")
    if not opening:
        return None
    end = _closing(rest, len(opcode))
    inside = re.sub(r"/\*.*?\*/|\{[^{}]*\}", "", rest[len(opcode) + 1 : end])
    operands = tuple(
        part.split()[-1].lstrip("%") for part in re.split(r",(?![^\[]*\])", inside) if part.strip()
    )
    return Instruction(head[2], type, opcode, operands, rest[end + 1 :], bool(head[1]))


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text)


def called(instruction: Instruction, attribute: str) -> str:
    """Return the computation that an attribute of an instruction names; "" if there is none.

    Args:
      instruction: any instruction.
      attribute: name of the attribute, such as "calls" or "to_apply".
    """
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", instruction.rest)
    return found[1] if found else ""


def _is_parameter(instruction: Instruction, index: int) -> bool:
    return instruction.opcode == "parameter" and instruction.operands == (str(index),)


def _received(instruction: Instruction) -> int:
    """Return the bytes of a collective's result, without the operand that a started one has."""
    types = re.findall(r"\w+\[[\d,]*\](?:\{[^{}]*\})?", instruction.type)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        count = len(instruction.operands)
        types = types[count : 2 * count]
    return sum(shape_bytes(type, padded=False) for type in types)
