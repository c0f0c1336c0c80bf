"""The fake of llama.cpp with recurrent layers: states, their snapshots, and all that llama.cpp does to them.

``RecurrentMemory`` follows ``llama_memory_recurrent`` (seq_rm, find_slot, s_copy), ``llama_batch_allocr::split_equal``
and ``llm_graph_context::build_rs`` line by line, stale snapshots and moved states included. A state is the text that it
has read, so a wrong one has wrong logits.
"""

from types import SimpleNamespace

from tests.runners.fake_llama import FakeLlama


class RecurrentMemory:
    """States of up to ``size`` sequences, each with ``snapshots`` earlier ones.

    ``rows[k * size + cell]`` is the state of a cell's sequence k tokens back, if the last call has written it.
    """

    def __init__(self, size, snapshots):
        self.size, self.snapshots = size, snapshots
        self.cells = [SimpleNamespace(pos=-1, src=-1, src0=-1, tail=-1, ids=set()) for _ in range(size)]
        self.rows = [()] * (size * (1 + snapshots))
        self.index = [0] * size
        self.head = self.used = 0

    def remove(self, number, start):
        """seq_rm up to the end."""
        if start == 0:
            self.index[number] = 0
        new_head = self.size
        if (tail := self.cells[number].tail) >= 0:
            cell = self.cells[tail]
            if 0 < start <= cell.pos:
                back = cell.pos - (start - 1)
                if self.index[number] or back > self.snapshots:
                    return False
                self.index[number], cell.pos = back, start - 1
                return True
            if start <= cell.pos:
                self.cells[number].tail = -1
        for index, cell in enumerate(self.cells):
            if cell.pos >= start and number in cell.ids:
                cell.ids.discard(number)
                if not cell.ids:
                    self.used -= 1
                    cell.pos = cell.src = -1
                    new_head = min(new_head, index)
        self.head = min(self.head, new_head)
        return True

    def split(self, ids, most):
        """split_equal: for each ubatch, of each sequence its rows."""
        keep, rows = self.snapshots + 1, {}
        assert most > keep, "the library aborts"
        for row, number in enumerate(ids):
            rows.setdefault(number, []).append(row)
        while rows:
            numbers = sorted(rows, key=lambda number: rows[number][0])
            count = min(min(map(len, rows.values())), max(1, most // len(numbers)))
            kept = []
            for number in numbers:
                left = len(rows[number]) - count
                if left and left < keep:
                    break
                kept.append(number)
            if not kept:
                kept, whole = numbers[:1], len(rows[numbers[0]])
                count = whole if whole <= most else min(count, whole - keep)
            yield [(number, rows[number][:count]) for number in kept]
            for number in kept:
                del rows[number][:count]
                if not rows[number]:
                    del rows[number]

    def place(self, ubatch, positions):
        """find_slot: bring the cells of the ubatch's sequences side by side; return the cells that are touched."""
        cells, size, count = self.cells, self.size, len(ubatch)
        if self.head > self.used + 2 * count:
            self.head = 0

        def free(cell):
            for _ in range(size):
                cell %= size
                if not cells[cell].ids:
                    return cell
                cell += 1
            return cell % size

        vacant, low, high = free(self.head), size - 1, 0
        for turn, (number, _) in enumerate(ubatch):
            if cells[number].tail < 0:
                assert not cells[vacant].ids
                cells[number].tail = vacant
                if turn + 1 < count:
                    vacant = free(vacant + 1)
            low, high = min(low, cells[number].tail), max(high, cells[number].tail)
        for turn, (number, _) in enumerate(ubatch):
            target, source = low + turn, cells[number].tail
            if target != source:
                first, other = cells[target], cells[source]
                first.pos, first.src, first.ids, other.pos, other.src, other.ids = (
                    other.pos, other.src, other.ids, first.pos, first.src, first.ids,
                )  # fmt: skip
                for cell in cells:
                    cell.tail = {source: target, target: source}.get(cell.tail, cell.tail)
        for turn, (number, rows) in enumerate(ubatch):
            cell = cells[low + turn]
            assert cell.pos + 1 == positions[rows[0]] or cell.pos < 0, "the library warns of a gap"
            cell.pos, cell.ids, cells[number].tail = positions[rows[-1]], {number}, low + turn
        referred = {cell.src for cell in cells if cell.src >= 0}
        zero = next((n for n in range(low, high + 1) if n not in referred), -1)
        for n in range(low, high + 1):
            assert cells[n].src >= 0 or zero >= 0
            cells[n].src0 = cells[n].src if cells[n].src >= 0 else zero
            cells[n].src = n
        self.head, self.used = low, sum(bool(cell.ids) for cell in cells)
        return low, high, zero

    def decode(self, ids, positions, tokens, most):
        """Return the text that the state has read with each row."""
        texts = [()] * len(ids)
        for ubatch in self.split(ids, most):
            low, high, zero = self.place(ubatch, positions)
            sources = []
            for n in range(low, high + 1):
                number = min(self.cells[n].ids, default=None)
                back = 0 if number is None else self.index[number]
                if number is not None:
                    self.index[number] = 0
                sources.append(back * self.size + self.cells[n].src0)
            if zero >= 0:
                self.rows[zero] = ()
            states = [self.rows[source] for source in sources]
            for n in range(low + len(ubatch), high + 1):
                self.rows[n] = states[n - low]
            for turn, (_, rows) in enumerate(ubatch):
                read = states[turn]
                for row in rows:
                    read = texts[row] = (*read, tokens[row])
                for back in range(min(len(rows), self.snapshots + 1)):
                    self.rows[back * self.size + low + turn] = texts[rows[-1 - back]]
        return texts


class FakeRecurrent(FakeLlama):
    """A model with attention layers and recurrent ones.

    Args:
        rolls: whether llama.cpp keeps snapshots for its architecture.
    """

    def __init__(self, *args, rolls=True, kind="is_hybrid", **more):
        super().__init__(*args, kind=kind, **more)
        self.rolls, self.states = rolls, {}

    def llama_n_rs_seq(self, context):
        return context.params.n_rs_seq if self.rolls else 0

    def llama_init_from_model(self, model, params):
        context = super().llama_init_from_model(model, params)
        if context is not None:
            context.recurrent = RecurrentMemory(params.n_seq_max, params.n_rs_seq)
        return context

    def llama_state_get_data(self, context, data, size):
        raise AssertionError("snapshots are not part of a saved state")

    def llama_memory_seq_cp(self, memory, source, number, start, end):
        raise AssertionError("a rollback is not copied")

    def llama_memory_seq_rm(self, memory, number, start, end):
        return memory.recurrent.remove(number, start) and super().llama_memory_seq_rm(memory, number, start, end)

    def advance(self, context, rows):
        tokens, positions, ids = ([row[n] for row in rows] for n in range(3))
        assert all(len(cell_ids) == 1 for cell_ids in ids)
        numbers = [cell_ids[0] for cell_ids in ids]
        texts = context.recurrent.decode(numbers, positions, tokens, context.params.n_ubatch)
        self.states = dict(zip(zip(numbers, positions, strict=True), texts, strict=True))

    def attended(self, context, pos, ids):
        """Return the tokens that a row attends to; with those that its state has read, if that is another text."""
        cells, read = super().attended(context, pos, ids), self.states[ids[0], pos]
        return cells if [token for _, token in cells] == list(read) else [*cells, *read]
