"""Tables in Markdown, every row printed as soon as it is measured."""

import torch


def row(first, *cells, width=36):
    print(f"| {first:{width}} | {' | '.join(f'{cell:>9}' for cell in cells)} |", flush=True)


def heading(title, *columns, width=36):
    print(f"\n{title}\n")
    row(*columns, width=width)
    row(*["---"] * len(columns), width=width)


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
