"""Decode's side of one room's data plane: what was offered, and the commit that decides whether it has arrived."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pd_common.errors import DigestMismatch, MetadataInvalid, PagesInvalid
from pd_common.handoff.chunk import PoolBuffers, check_pages, pages_to_transfer
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, check_seal
from pd_common.types import BootstrapRoom


@dataclass(frozen=True, slots=True)
class Arrival:
    """What this rank finds in its own memory once success was reported: the row, or what is wrong with it."""

    metadata: HandoffMetadata | None
    failure: MetadataInvalid | DigestMismatch | None

    @property
    def landed(self) -> bool:
        """The row is this room's, of this generation, and covers the prompt."""
        return not isinstance(self.failure, MetadataInvalid)

    @property
    def intact(self) -> bool:
        """Row and pages are what was sent."""
        return self.failure is None


class KVReceiver:
    """Holds one offer until it is committed or given up. Never believes a report of success: it looks into the slot.

    Pages are hashed, once each and in order, when the sender has reported or marked them complete, while the next ones
    travel; `digest`, if any, is a fresh one that reads the destination pool. That is no weaker than hashing all of them
    at the end: what says that a page is there comes after its write, and a sender writes each page once. Other writers
    are kept out by the quarantine (I2), not by the digest. A report that lies makes a digest that does not match.
    """

    def __init__(
        self,
        room: BootstrapRoom,
        offer: Offer,
        pool: PoolBuffers,
        metadata: MetadataBuffers,
        digest: PageDigest | None,
    ) -> None:
        expected = pages_to_transfer(offer.prompt_tokens, offer.decode_prefix_len, pool.page_size)
        self.room = room
        self.offer = offer
        self._pages = check_pages(offer.pages, pool.num_pages, expected)
        self._metadata = metadata
        self._digest = digest
        self._complete = 0
        self._hashed = 0
        self._hashing: asyncio.Task[None] | None = None

    def pages_complete(self, pages_done: int) -> None:
        """The sender reports that the first `pages_done` pages of the offer are visible: they can be hashed.

        Raises:
            PagesInvalid: more pages than were offered.

        """
        if pages_done > len(self._pages):
            message = "More pages are reported than were offered"
            raise PagesInvalid(message, room=self.room, offered=len(self._pages), reported=pages_done)
        self._complete = max(self._complete, pages_done)
        busy = self._hashing is not None and not self._hashing.done()
        if self._digest is not None and self._hashed < self._complete and not busy:
            self._hashing = asyncio.create_task(self._hash(self._digest))

    def look(self) -> bool:
        """Looks into the slot while the sender may be writing its last chunk; True when it has sealed the room.

        Pages that are marked as there begin to be hashed.
        """
        slot = self.offer.slot
        self.pages_complete(min(self._metadata.get_mark(slot), len(self._pages)))
        seal = self._metadata.get_seal(slot)
        return (seal.room, seal.generation) == (self.room, slot.generation)

    async def arrival(self) -> Arrival:
        """The gate, then the digest of the pages, once the sender has reported success."""
        try:
            return Arrival(await self.commit(), None)
        except (MetadataInvalid, DigestMismatch) as failure:
            return Arrival(None, failure)

    async def commit(self) -> HandoffMetadata:
        """What `arrival` finds.

        Raises:
            MetadataInvalid: the row is not this room's, not of this generation, or does not cover the whole prompt.
            DigestMismatch: row or pages are not what was sent, or the sender made no digest.

        """
        metadata = self._read_metadata()
        if self._digest is not None:
            self.pages_complete(len(self._pages))
            await self.quiet()
            if self._hashing is not None:
                self._hashing.result()
            self._compare(self._digest.digest(), metadata.digest)
        return metadata

    async def quiet(self) -> None:
        """Returns when no page is being read any more; a cancelled caller may call it again."""
        if self._hashing is not None:
            await asyncio.wait([self._hashing])

    def _read_metadata(self) -> HandoffMetadata:
        seal = self._metadata.get_seal(self.offer.slot)
        generation, prompt_tokens = self.offer.slot.generation, self.offer.prompt_tokens
        check_seal(seal, room=self.room, generation=generation, prompt_tokens=prompt_tokens)
        return self._metadata.get_buf(self.offer.slot)

    async def _hash(self, digest: PageDigest) -> None:
        while self._hashed < self._complete:
            end = self._complete
            await asyncio.to_thread(digest.update, self._pages[self._hashed : end])
            self._hashed = end

    def _compare(self, got: bytes, expected: bytes | None) -> None:
        if got != expected:
            message = "The pages that arrived are not the pages that were sent"
            shown = expected.hex() if expected else "none"
            raise DigestMismatch(message, room=self.room, expected=shown, got=got.hex())
