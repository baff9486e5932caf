"""Decode's side of one room's data plane: what was offered, and the commit that decides whether it has arrived."""

from __future__ import annotations

from pd_common.errors import DigestMismatch
from pd_common.handoff.chunk import PoolBuffers, check_pages, pages_to_transfer
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import digest_pages
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, check_seal
from pd_common.types import BootstrapRoom


class KVReceiver:
    """Holds one offer until it is committed or given up. Never believes a report of success: it looks into the slot."""

    def __init__(
        self, room: BootstrapRoom, offer: Offer, pool: PoolBuffers, metadata: MetadataBuffers, *, with_digest: bool
    ) -> None:
        expected = pages_to_transfer(offer.prompt_tokens, offer.decode_prefix_len, pool.page_size)
        self.room = room
        self.offer = offer
        self._pages = check_pages(offer.pages, pool.num_pages, expected)
        self._pool = pool
        self._metadata = metadata
        self._with_digest = with_digest

    def commit(self) -> HandoffMetadata:
        """Both steps below in one, once the sender has reported success. A digest reads every page: use a thread.

        Raises:
            MetadataInvalid, DigestMismatch: from the two steps.

        """
        metadata = self.read_metadata()
        self.verify_digest(metadata)
        return metadata

    def read_metadata(self) -> HandoffMetadata:
        """The gate: the row, if it is this room's, of this generation, and covers the whole prompt.

        Raises:
            MetadataInvalid: names what differs.

        """
        seal = self._metadata.get_seal(self.offer.slot)
        generation, prompt_tokens = self.offer.slot.generation, self.offer.prompt_tokens
        check_seal(seal, room=self.room, generation=generation, prompt_tokens=prompt_tokens)
        return self._metadata.get_buf(self.offer.slot)

    def verify_digest(self, metadata: HandoffMetadata) -> None:
        """Compares the offered pages with what the sender hashed, if digests are on. May run in a thread.

        Raises:
            DigestMismatch: other bytes arrived, or the sender made no digest.

        """
        if not self._with_digest:
            return
        got = digest_pages(self._pool, self._pages)
        if got != metadata.digest:
            expected = metadata.digest.hex() if metadata.digest else "none"
            message = "The pages that arrived are not the pages that were sent"
            raise DigestMismatch(message, room=self.room, expected=expected, got=got.hex())
