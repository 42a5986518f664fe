"""The types of the HTTP contract, shared by the server and the client. Decoding is strict; encoding omits nothing."""
