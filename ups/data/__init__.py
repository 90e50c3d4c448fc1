"""Data of any equation: read, made, checked and written."""


def __getattr__(name):
    if name == "write_fields":  # numpy and h5py only where they are needed
        from ups.data.write import write_fields

        return write_fields
    raise AttributeError(name)
