"""The HTTP room: the only one that knows Quart and hypercorn. It decodes, asks the rooms below, and encodes."""
