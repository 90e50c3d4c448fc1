"""Read an offline W&B file: a LevelDB log of protocol buffers, as wandb itself writes it.

Seven bytes of header, then blocks of 32 KiB that hold records: 4 bytes checksum, 2 bytes length,
1 byte kind (1 whole, 2 first, 3 middle, 4 last part of a record).
"""

import struct

BLOCK = 32768


def records(path):
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no room for a record's head: zeros up to the next block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def summary(folder):
    """One dictionary for each offline file below a folder, oldest first."""
    found = []
    for path in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        one = {"id": None, "steps": [], "exit": None}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
                one |= {"id": run.run_id, "project": run.project, "group": run.run_group,
                        "name": run.display_name, "tags": list(run.tags),
                        "config": {item.key for item in run.config.update}}
            if kind == "history":
                one["steps"].append(record.history.step.num)
            if kind == "exit":
                one["exit"] = record.exit.exit_code
        found.append(one)
    return found
