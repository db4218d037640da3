"""What Hopper's machine code says, as ``cuobjdump`` prints it, that Triton's assembly doesn't."""

import re

# Its place, its text, and the half of it that says which scoreboards it waits for and which one it sets.
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(.*?) *; +/\* 0x\w{16} \*/\s+/\* (0x\w{16}) \*/")
SCOREBOARDS = range(6)


def unfinished_loads(sass: str) -> int:
    """How many loads from shared memory may be under way when a barrier there counts that a slot was read.

    That is at ``mbarrier.arrive``, by one thread, or at the barrier of all threads before it. A load has ended where an
    instruction waits for its scoreboard, or for that of a later load: they end in order.
    """
    code = [(int(place, 16), text, int(control, 16)) for place, text, control in INSTRUCTION.findall(sass)]
    assert any("A1T0" in text for _, text, _ in code), sass
    index = {place: i for i, (place, _, _) in enumerate(code)}
    load_bits = {i: 1 << i for i, (_, text, _) in enumerate(code) if re.search(r"\bLDSM?\b", text)}
    # Sets of loads before each instruction: for each scoreboard, those that may be under way once it was waited for;
    # those that may be under way; those that may have been, in any warp, at the last barrier of all threads.
    states = [(0,) * 8] * len(code)
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
        ends = re.match(r"(BRA(\.\w+)* 0x|BRX|EXIT|RET)", text) or i + 1 == len(code)
        following = [] if ends else [i + 1]
        if target := re.search(r"\bBRA\b.*0x([0-9a-f]+)$", text):
            following.append(index[int(target[1], 16)])
        for each in following:
            merged = tuple(a | b for a, b in zip(states[each], state, strict=True))
            if merged != states[each]:
                states[each] = merged
                work.append(each)
    return unfinished.bit_count()
