"""The common parts of links by copy engines between GPUs of one host, and the host relay.

Between every two ranks there are two lanes for each direction, which take chunks in turn; a lane
has a stream on either side and a ring of slots. A sender's stream waits until a slot is free,
copies a chunk there and counts it; the receiver's stream waits for that count, copies the chunk to
its place and counts it too. Streams wait and count by memory operations, so that no thread of the
host takes part and no multiprocessor is taken. While one lane waits and counts, the other copies.

A link may also have rings of its senders; all receivers copy the data for every one of them out of
these. Their chunks count as chunks of all rings of the lane, and come in order with those.

Every rank issues, chunk after chunk, first its sends to each peer and then its receives from each.
So a stream waits only for operations that every rank has issued earlier, and transfers go on even
if the streams of a GPU share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from flashmoe_megatron.errors import FlashMoEError, LinkError, reason_of, told_error
from flashmoe_megatron.multipath import board
from flashmoe_megatron.multipath.board import MAX_RANKS, NUM_LANES, NUM_SLOTS, Watch
from flashmoe_megatron.multipath.links import Exchange, Flight, Link
from flashmoe_megatron.multipath.memory import SegmentPlace, SharedMemory
from flashmoe_megatron.multipath.queues import Queue, Queues
from flashmoe_megatron.ranks import StoreRanks

Slots = tuple[dict[int, int], dict[int, int], dict[int, int]]
"""The addresses of slots for queues: those from each peer, those to each peer, and each rank's
for the data that it sends to all; the last is empty if the link has none."""

_FAR = 2**30
"""A counter that no rank will count on any more is set so far ahead."""


def has_counted(word: Any, count: int) -> bool:
    """Returns whether a word has come to a count, modulo 2**32."""
    return (int(word.value) - count) & 0xFFFFFFFF < 2**31


def far_ahead(count: int) -> int:
    """Returns a value for a word that ends waits for a count, and for any soon after it."""
    return (count + _FAR) & 0xFFFFFFFF


class Awaited:
    """A word that a peer counts in and that this rank's streams wait for.

    Attributes:
        word: The word, for the host.
        count: How far this rank has issued what it counts.
    """

    def __init__(self, word: Any) -> None:
        self.word, self.count = word, 0
        self._slack = 0  # how many counts the peer may lack without this rank's waiting

    def is_behind(self) -> bool:
        """Returns whether the peer has not yet counted as far as this rank's streams wait for."""
        missing = (self.count - int(self.word.value)) & 0xFFFFFFFF
        return self._slack < missing < 2**31

    def release(self) -> None:
        """Lets streams go on that wait for it."""
        self.word.value = far_ahead(self.count)


class _Ring(Awaited):
    """A lane of one direction between two ranks, as one of the two sees it; it counts chunks.

    Args:
        queues: Copy and count.
        stream: This rank's queue of the lane.
        slots: Where queues find them.
        slot_bytes: The size of one.
        awaited: Where queues find the word that the peer counts in.
        counted: Where they find the word that this rank counts in.
        word: The word at ``awaited``, for the host.

    Attributes:
        common: Slot after slot of the data that the peer sends to all, if the link has that.
    """

    def __init__(
        self,
        queues: Queues,
        stream: Queue,
        slots: int,
        slot_bytes: int,
        awaited: int,
        counted: int,
        word: Any,
    ) -> None:
        self._queues, self.stream = queues, queues.handle(stream)
        self._slots = _slots_at(slots, slot_bytes)
        super().__init__(word)
        self._awaited, self._counted = awaited, counted
        self.common: Iterator[int] = iter(())

    def send(self, address: int, nbytes: int) -> None:
        """Issues the next chunk, from an address to the peer."""
        self.await_slot()
        self._queues.copy(self._slots[self.count % NUM_SLOTS], address, nbytes, self.stream)
        self.count_sent()

    def await_slot(self) -> None:
        """Waits until a slot is free: the peer has taken all chunks but those in other slots."""
        free = self.count + 1 - NUM_SLOTS
        # The host may see already that the slot is free, which spares the stream the wait.
        if free > 0 and not has_counted(self.word, free):
            self._queues.wait_value(self.stream, self._awaited, free)

    def count_sent(self) -> None:
        """Counts a chunk that is in its slot."""
        self._slack = NUM_SLOTS
        self._count()

    def receive(self, address: int, nbytes: int) -> None:
        """Issues the next chunk, from the peer to an address."""
        self._take(self._slots[self.count % NUM_SLOTS], address, nbytes)

    def receive_common(self, address: int, nbytes: int) -> None:
        """Issues the next chunk, which the peer sends to all."""
        self._take(next(self.common), address, nbytes)

    def _take(self, slot: int, address: int, nbytes: int) -> None:
        self._queues.wait_value(self.stream, self._awaited, self.count + 1)
        self._queues.copy(address, slot, nbytes, self.stream)
        self._count()

    def _count(self) -> None:
        self.count += 1
        self._queues.write_value(self.stream, self._counted, self.count)


def _slots_at(address: int, nbytes: int) -> list[int]:
    """The slots of a lane, of so many bytes each."""
    return [address + index * nbytes for index in range(NUM_SLOTS)]


class RingLink(Link):
    """The base class of the host relay and peer copies.

    Args:
        ranks: Ranks of one host.
        queues: This rank's, of the device where tensors are.
        has_slots: Whether this rank's segment has its rings, after its header.

    Raises:
        HeapError: The host, or the GPU, has no room for the rings.
        LinkError: Ranks do not share a host.
        DeviceError: The driver refuses.
    """

    def __init__(self, ranks: StoreRanks, queues: Queues, *, has_slots: bool = False) -> None:
        if ranks.num_ranks > MAX_RANKS:
            raise LinkError(
                f"{ranks.num_ranks} ranks: wanted at most {MAX_RANKS}, which share one host"
            )
        self.rank, self.timeout = ranks.rank, ranks.timeout
        self.peers = [(self.rank + step) % ranks.num_ranks for step in range(1, ranks.num_ranks)]
        self.sends_once = has_slots and len(self.peers) > 1
        num_rings = len(self.peers) + self.sends_once
        self.slot_bytes = queues.slot_bytes(NUM_LANES * NUM_SLOTS * num_rings)
        self.ring_bytes = NUM_LANES * NUM_SLOTS * self.slot_bytes
        self.queues = queues
        self.broken: FlashMoEError | None = None
        self._has_failed = False
        self._verdict: torch.Tensor | None = None
        self._num_ended = 0
        self._stack = contextlib.ExitStack()
        try:
            with queues.here():
                self._open(ranks, num_rings * self.ring_bytes if has_slots else 0)
        except BaseException:
            self._stack.close()
            raise
        self.watch = Watch(self)

    def _open(self, ranks: StoreRanks, own_bytes: int) -> None:
        self.streams = [(self.queues.make(), self.queues.make()) for _ in range(NUM_LANES)]
        self.streams[0][0].synchronize()  # makes the GPU's context this thread's

        def create() -> SegmentPlace:
            node = self.queues.numa_node()
            self.own = SharedMemory.create(board.HEADER_BYTES + own_bytes, node)
            self._stack.callback(self.own.close)
            board.clear(self.own)
            self.own.hold()
            self._notice = self.own.word(board.NOTICE)
            return self.own.place

        places = ranks.all(create)
        self.memories: dict[int, SharedMemory] = {self.rank: self.own}

        def connect() -> None:
            for peer in self.peers:
                self.memories[peer] = SharedMemory.open(places[peer])
                self._stack.callback(self.memories[peer].close)

        ranks.all(connect)
        self._logs = {rank: board.Log(memory, rank) for rank, memory in self.memories.items()}
        self.headers: dict[int, int] = {}

        def register() -> None:
            for peer, memory in self.memories.items():
                self.headers[peer] = self.registered(memory, 0, board.HEADER_BYTES)

        ranks.all(register)
        self._ended = self.headers[self.rank] + board.ENDED
        inbound, outbound, common = self._slots(ranks)
        self.inbound: dict[int, list[_Ring]] = {peer: [] for peer in self.peers}
        self.outbound: dict[int, list[_Ring]] = {peer: [] for peer in self.peers}
        own, nbytes = self.headers[self.rank], self.slot_bytes
        for peer in self.peers:
            theirs, memory = self.headers[peer], self.memories[peer]
            for lane, (to_peer, from_peer) in enumerate(self.streams):
                offset = lane * NUM_SLOTS * nbytes
                full, free = board.full_word(peer, lane), board.free_word(peer, lane)
                slots, word = inbound[peer] + offset, self.own.word(full)
                ring = _Ring(self.queues, from_peer, slots, nbytes, own + full, own + free, word)
                if self.sends_once:
                    ring.common = itertools.cycle(_slots_at(common[peer] + offset, nbytes))
                self.inbound[peer].append(ring)
                full, free = board.full_word(self.rank, lane), board.free_word(self.rank, lane)
                slots, word = outbound[peer] + offset, memory.word(free)
                ring = _Ring(
                    self.queues, to_peer, slots, nbytes, theirs + free, theirs + full, word
                )
                self.outbound[peer].append(ring)
        self._common = [
            itertools.cycle(_slots_at(common[self.rank] + lane * NUM_SLOTS * nbytes, nbytes))
            for lane in (range(NUM_LANES) if self.sends_once else ())
        ]
        self.awaited: dict[int, list[Awaited]] = {
            peer: [*self.inbound[peer], *self.outbound[peer]] for peer in self.peers
        }

    def _slots(self, ranks: StoreRanks) -> Slots:
        """Returns where all slots are. Collective."""
        raise NotImplementedError

    def offset(self, owner: int, sender: int) -> int:
        """Returns the place of a sender's ring among the rings of their owner."""
        return (sender - (sender > owner)) * self.ring_bytes

    def registered(self, memory: SharedMemory, offset: int, nbytes: int) -> int:
        """Pins a part of a segment until the link is closed; returns where GPUs see it."""
        address = memory.address + offset
        seen = self.queues.register(address, nbytes)
        self._stack.callback(self.queues.unregister, address)
        return seen

    def begin(self, exchange: Exchange, index: int) -> "RingFlight":
        """See the base class."""
        self.announce(exchange.number, exchange.what)
        return RingFlight(self, exchange, index)

    def announce(self, number: int, what: str) -> None:
        """See the base class; tells peers which exchange begins here."""
        self.raise_if_broken()
        self._logs[self.rank].add(number, what)
        try:
            for peer in self.peers:
                self._logs[peer].check(self.rank, number, what)
        except FlashMoEError as error:
            self.fail(error)
            raise

    def end(self, stream: Queue) -> int:
        """Counts an exchange as ended when a stream comes here; gives its number.

        Another stream waits for such a word sooner than for an event. The word only grows, since an
        exchange begins after the end of the one before.
        """
        self._num_ended += 1
        self.queues.write_value(self.queues.handle(stream), self._ended, self._num_ended)
        return self._num_ended

    def await_end(self, stream: Queue, number: int) -> None:
        """Makes a stream wait for that."""
        self.queues.wait_value(self.queues.handle(stream), self._ended, number)

    def send_to_all(self, lane: int, address: int, nbytes: int) -> None:
        """Issues a lane's next chunk, from an address to every peer, if the link sends it once."""
        rings = [self.outbound[peer][lane] for peer in self.peers]
        for ring in rings:
            ring.await_slot()
        self.queues.copy(next(self._common[lane]), address, nbytes, rings[0].stream)
        for ring in rings:
            ring.count_sent()

    def admit(self, stream: Any, nbytes: int) -> None:
        """Called before a chunk is issued; a slower link can hold its stream back here."""

    def problem(self) -> FlashMoEError | None:
        """Returns the error that has ended the link, here or on another rank, if any has."""
        if self.broken is None and self._notice.value:
            told = board.notice(self.own)
            assert told is not None
            rank, _, reason = told.partition(" ")
            self.broken = told_error(int(rank), reason)
        return self.broken

    def raise_if_broken(self) -> None:
        """See the base class."""
        if (problem := self.problem()) is not None:
            raise problem

    def fail(self, error: FlashMoEError) -> None:
        """See the base class.

        Partners' verdicts are posted before a stream of this link is let go on, so that any of them
        will do to guard what several have brought.
        """
        self.broken = self.broken or error
        for memory in self.memories.values():
            board.post(memory, f"{self.rank} {reason_of(error)}")
        if not self._has_failed:
            self._has_failed = True
            for partner in self.partners:
                partner.fail(error)
        self.watch.wake()

    def release(self) -> None:
        """Lets streams go on whose peer will never count again; what they move has no meaning."""
        for one in itertools.chain(*self.awaited.values()):
            one.release()

    def guard(self, output: torch.Tensor) -> bool:
        """See the base class."""
        if output.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return False
        if self._verdict is None:
            place = self.headers[self.rank] + board.VERDICT
            self._verdict = self.queues.tensor(place, 4).view(torch.float32)
        self.queues.do(functools.partial(output[:1].mul_, self._verdict))
        return True

    def leave(self) -> None:
        """See the base class."""
        # Sums and marks are in streams of others. After a failure the watch lets streams go on.
        self.queues.synchronize()
        self.watch.close()
        self.broken = self.broken or LinkError("it has been closed")

    def close(self) -> None:
        """Waits for the work that the GPU has been given and frees the link's memory."""
        self.leave()
        self._stack.close()


class HostRelay(RingLink):
    """Through pinned memory of the host, on the node of the receiver's GPU. Collective."""

    name = "host"

    def __init__(self, ranks: StoreRanks, queues: Queues) -> None:
        super().__init__(ranks, queues, has_slots=True)

    def _slots(self, ranks: StoreRanks) -> Slots:
        inbound: dict[int, int] = {}
        outbound: dict[int, int] = {}
        common: dict[int, int] = {}

        def register() -> None:
            for peer in self.peers:
                theirs = self.memories[peer]
                for owner, sender, memory, found in (
                    (self.rank, peer, self.own, inbound),
                    (peer, self.rank, theirs, outbound),
                ):
                    offset = board.HEADER_BYTES + self.offset(owner, sender)
                    found[peer] = self.registered(memory, offset, self.ring_bytes)
            offset = board.HEADER_BYTES + len(self.peers) * self.ring_bytes
            for rank, memory in self.memories.items() if self.sends_once else ():
                common[rank] = self.registered(memory, offset, self.ring_bytes)

        ranks.all(register)
        return inbound, outbound, common


class RingFlight(Flight):
    """The part of an exchange that a ring link carries; ``what`` is the operation, for messages."""

    def __init__(self, link: RingLink, exchange: Exchange, index: int) -> None:
        super().__init__(exchange, index)
        self.what, self.link = exchange.what, link
        self._pieces, self._stream = exchange.pieces, exchange.stream
        self._is_common = exchange.pieces[0].to_all and link.sends_once

    def steps(self) -> Iterator[None]:
        """Issues a chunk to and from every peer at a time."""
        link, (begin, end, chunk) = self.link, self.part
        chunk = min(chunk, link.slot_bytes)
        lanes = link.streams[: -(-(end - begin) // chunk)]
        sends = [(link.outbound[one.peer], *_bounds(one.send)) for one in self._pieces]
        receives = [(link.inbound[one.peer], *_bounds(one.receive)) for one in self._pieces]
        # Streams that carry nothing would cost the host calls of the driver all the same.
        ways = [any(length > begin for _, _, length in way) for way in (sends, receives)]
        self.enter([stream for lane in lanes for stream in itertools.compress(lane, ways)])
        for number, at in enumerate(range(begin, end, chunk)):
            lane, behind = number % NUM_LANES, min(at + chunk, end)
            for rings, address, length in sends[:1] if self._is_common else sends:
                if (nbytes := min(behind, length) - at) > 0:
                    link.admit(rings[lane].stream, nbytes)
                    if self._is_common:
                        link.send_to_all(lane, address + at, nbytes)
                    else:
                        rings[lane].send(address + at, nbytes)
            for rings, address, length in receives:
                if (nbytes := min(behind, length) - at) > 0:
                    receive = rings[lane].receive_common if self._is_common else rings[lane].receive
                    receive(address + at, nbytes)
            yield
        self.leave()

    def enter(self, streams: list[Queue]) -> None:
        """Lets streams take part besides the current one; without any it does all itself."""
        self._streams = streams or [self._stream]
        for stream in streams:
            stream.wait_event(self.started)

    def leave(self) -> None:
        """Marks the end of the issued work."""
        self._pieces = ()
        first, *others = self._streams
        for stream in others:
            first.wait_stream(stream)
        self.ended = self.link.queues.moment(first, self.is_timed)
        self._end_number = None if first is self._stream else self.link.end(first)
        self.link.watch.add(self)

    def has_begun(self) -> bool:
        """Returns whether the stream has come to it: then it waits for peers or for nothing."""
        return bool(self.started.query())

    def is_over(self) -> bool:
        """Returns whether it waits for nothing any more."""
        return bool(self.ended.query())

    def join(self) -> None:
        """See the base class."""
        self.link.raise_if_broken()
        if self._end_number is not None:
            self.link.await_end(self._stream, self._end_number)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """The address and the length of a flat tensor of bytes."""
    return tensor.data_ptr(), tensor.numel()
