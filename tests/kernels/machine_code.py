"""What Hopper's machine code says, as ``nvdisasm`` prints it, that Triton's assembly doesn't."""

import re
import struct
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Its place, its text, and the half of it that says which scoreboards it waits for and which one it sets.
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(.*?) *; +/\* 0x\w{16} \*/\s+/\* (0x\w{16}) \*/")
SCOREBOARDS = range(6)


# A product of a group of warps: the registers of its sums and, where they aren't in shared memory, of its operand A.
PRODUCT = re.compile(r"[IHQ]GMMA\S* R\d+, (?:R(\d+), )?")
OPERAND_REGISTERS = 4
MAX_GROUPS = 8  # of products in flight
INSTRUCTION_BYTES = 16  # which are two lines of text


def disassembled(cubins: list[bytes]) -> list[str]:
    """The instructions of the kernel in each. Places, and those that branches go to, are of all of them in a row.

    One call for all: the disassembler takes a third of a second to start.
    """
    if not cubins:
        return []
    codes = [code_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [TOOLS / "nvdisasm", "-hex", "--binary", "SM90", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in output.splitlines() if "/* 0x" in line]
    texts, place = [], 0
    for code in codes:
        text = lines[place // INSTRUCTION_BYTES * 2 : (place + len(code)) // INSTRUCTION_BYTES * 2]
        assert text[0].lstrip().startswith(f"/*{place:04x}*/"), text[0]
        texts.append("\n".join(text))
        place += len(code)
    return texts


def code_of(cubin: bytes) -> bytes:
    """The section of an ELF file with the code of its only kernel."""
    table, size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    names_at = sections[names][1]
    (code,) = (cubin[at : at + n] for name, at, n in sections if cubin.startswith(b".text.", names_at + name))
    return code


def read(sass: str) -> list[tuple[int, str, int]]:
    """The instructions: place, text and control."""
    return [(int(place, 16), text, int(control, 16)) for place, text, control in INSTRUCTION.findall(sass)]


def following(code: list[tuple[int, str, int]]) -> list[list[int]]:
    """Which instructions may come after each, by index."""
    index = {place: i for i, (place, _, _) in enumerate(code)}
    after = []
    for i, (_, text, _) in enumerate(code):
        ends = re.match(r"(BRA(\.\w+)* 0x|BRX|EXIT|RET)", text) or i + 1 == len(code)
        next_ones = [] if ends else [i + 1]
        if target := re.search(r"\bBRA\b.*0x([0-9a-f]+)$", text):
            next_ones.append(index[int(target[1], 16)])
        after.append(next_ones)
    return after


def overwritten_operands(sass: str) -> int:
    """How many instructions may write registers that a product under way still reads, as its operand A.

    That is a fault of assemblers before CUDA 13.3. A product has read them when it, or a later one, was waited for.
    """
    code = read(sass)
    after = following(code)
    # Of the groups of products that may be in flight before each instruction, the newest first, the registers that they
    # read; before those, what was started since.
    empty = (frozenset[int](),) * (MAX_GROUPS + 1)
    states: list[tuple[frozenset[int], ...]] = [empty] * len(code)
    overwriting = set()
    work = list(reversed(range(len(code))))
    while work:
        i = work.pop()
        text = re.sub(r"^@!?U?P\w+ ", "", code[i][1])
        started, *groups = states[i]
        if product := PRODUCT.match(text):
            if product[1]:
                started |= frozenset(range(int(product[1]), int(product[1]) + OPERAND_REGISTERS))
            if "gsb0" in text:
                groups = [started, *groups[:-2], groups[-2] | groups[-1]]
                started = frozenset()
        elif wait := re.search(r"DEPBAR\.LE gsb0, 0x(\w+)", text):
            left = int(wait[1], 16)
            groups = [group if age < left else frozenset() for age, group in enumerate(groups)]
        elif written(text) & started.union(*groups):
            overwriting.add(i)
        state = (started, *groups)
        for each in after[i]:
            merged = tuple(a | b for a, b in zip(states[each], state, strict=True))
            if merged != states[each]:
                states[each] = merged
                work.append(each)
    return len(overwriting)


def written(text: str) -> frozenset[int]:
    """The registers that an instruction writes."""
    found = re.match(r"(\S+) (?:P\w+, )*R(\d+)\b", text)
    if not found or found[1].startswith(("ST", "RED", "SYNCS", "BAR", "UTMA", "UBLK")):
        return frozenset()
    wide = {r"\.M88\.4|\.128": 4, r"\.M88\.2|\.64|WIDE": 2}
    count = next((count for pattern, count in wide.items() if re.search(pattern, found[1])), 1)
    return frozenset(range(int(found[2]), int(found[2]) + count))


def unfinished_loads(sass: str) -> int:
    """How many loads from shared memory may be under way when a barrier there counts that a slot was read.

    That is at ``mbarrier.arrive``, by one thread, or at the barrier of all threads before it. A load has ended where an
    instruction waits for its scoreboard, or for that of a later load: they end in order.
    """
    code = read(sass)
    after_each = following(code)
    assert any("A1T0" in text for _, text, _ in code), sass
    load_bits = {i: 1 << i for i, (_, text, _) in enumerate(code) if re.search(r"\bLDSM?\b", text)}
    # Sets of loads before each instruction: for each scoreboard, those that may be under way once it was waited for;
    # those that may be under way; those that may have been, in any warp, at the last barrier of all threads.
    states: list[tuple[int, ...]] = [(0,) * 8] * len(code)
    unfinished = 0
    work = list(reversed(range(len(code))))
    while work:
        i = work.pop()
        _, text, control = code[i]
        *after, own, others = states[i]
        for board in SCOREBOARDS:
            if control >> 52 >> board & 1 or f"DEPBAR.LE SB{board}, 0x0" in text:
                own &= after[board]
        if "SYNCS.ARRIVE" in text and "A1T0" in text:
            unfinished |= own | others
        if "BAR.SYNC" in text:
            others = own
        if i in load_bits:
            own |= load_bits[i]
            after = [0 if control >> 46 & 7 == board else after[board] | load_bits[i] for board in SCOREBOARDS]
        state = (*(each & own for each in after), own, others)
        for each in after_each[i]:
            merged = tuple(a | b for a, b in zip(states[each], state, strict=True))
            if merged != states[each]:
                states[each] = merged
                work.append(each)
    return unfinished.bit_count()
