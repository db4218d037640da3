"""What lies between a merged q|k|v product and attention: norms of queries and keys, rotary embedding, the cache.

- ``rotate``: queries, keys and values, each laid out as attention wants it.
- ``rotate_and_store``: the same, with keys and values written to a cache.
- ``store_key_value``: the writing alone, for keys that were rotated elsewhere.
- ``rotary_angles``: cosines and sines of positions, once for all layers.
"""
