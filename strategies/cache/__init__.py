"""Keys and values while decoding: where they lie and in how many bits."""
