"""Senders and receivers that the emulator's tests start inside regions: sockets, nothing else.

    python emulate_endpoints.py COMMAND HOST [NUMBER...]

Each prints one line of JSON, receivers first the line ``ready``.
"""

import hashlib
import json
import random
import socket
import sys
import time

PORT = 7000
DATAGRAM_BYTES = 200


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _ready() -> None:
    print("ready", flush=True)


def tcp_receive(host: str) -> dict:
    """Read one connection to its end."""
    with socket.create_server((host, PORT), family=_family(host)) as server:
        _ready()
        connection, _ = server.accept()
    total, digest = 0, hashlib.sha256()
    with connection:
        while data := connection.recv(1 << 20):
            total += len(data)
            digest.update(data)
        connection.sendall(b"!")
    return {"bytes": total, "digest": digest.hexdigest()}


def tcp_send(host: str, count: int) -> dict:
    """Send so many random bytes."""
    data = random.Random(count).randbytes(count)
    with socket.create_connection((host, PORT)) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"!"
    return {"digest": hashlib.sha256(data).hexdigest()}


def rate_receive(host: str, warmup_s: float) -> dict:
    """Measure what arrives after a warm-up, in bits a second."""
    with socket.create_server((host, PORT), family=_family(host)) as server:
        _ready()
        connection, _ = server.accept()
    with connection:
        connection.recv(1)
        begin, total = time.monotonic() + warmup_s, 0
        end = begin
        buffer = bytearray(1 << 20)
        while size := connection.recv_into(buffer):
            now = time.monotonic()
            if now > begin:
                total, end = total + size, now
    return {"bits_per_s": total * 8 / (end - begin)}


def rate_send(host: str, seconds: float) -> dict:
    """Send as much as goes for a time."""
    data = bytes(1 << 17)
    end = time.monotonic() + seconds
    with socket.create_connection((host, PORT)) as connection:
        while time.monotonic() < end:
            connection.sendall(data)
    return {}


def udp_receive(host: str, idle_s: float) -> dict:
    """Count datagrams until none came for a time; the clock starts with the first."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        receiver.bind((host, PORT))
        _ready()
        receiver.settimeout(30)
        total = 0
        try:
            while True:
                receiver.recv(2048)
                receiver.settimeout(idle_s)
                total += 1
        except TimeoutError:
            return {"datagrams": total}


def udp_send(host: str, flows: int, datagrams: int, burst: int, pause_s: float) -> dict:
    """Send datagrams from so many ports, in bursts with pauses between."""
    sockets = [socket.socket(_family(host), socket.SOCK_DGRAM) for _ in range(flows)]
    data = bytes(DATAGRAM_BYTES)
    begin = time.monotonic()
    for number in range(datagrams):
        sockets[number % flows].sendto(data, (host, PORT))
        if (number + 1) % burst == 0:
            time.sleep(pause_s)
    return {"seconds": time.monotonic() - begin}


if __name__ == "__main__":
    command, host, *numbers = sys.argv[1:]
    print(json.dumps(globals()[command](host, *map(json.loads, numbers))), flush=True)
