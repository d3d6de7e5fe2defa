"""The I/O thread of a node: every socket, every heartbeat, the node's own HTTP.

    engine thread ─ send, publish ─▶ NodeIO ──▶ asyncio loop: RouterLinks   DEALER to each router
                  ◀─ drain, wait ─── Inbox ◀──                PeerServer    ROUTER (prefill node)
                                                           or PeerDialler   DEALERs (decode node)
                                                              NodeHTTP      health, metrics, admin

What is decided (who is linked, which message is stale, who is silent) lives in the pure classes of
`router_link` and `peer_link`; what touches sockets is beside them. Clocks are `time.monotonic`.
"""
