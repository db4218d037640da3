"""The steps between a merged q|k|v product and attention: norms of queries and keys, rotary embedding, the cache.

- ``rotate``: returns queries, keys and values, each in the layout that attention expects.
- ``rotate_and_store``: the same, but writes keys and values to a cache.
- ``store_key_value``: only writes, for keys that were rotated elsewhere.
- ``rotary_angles``: cosines and sines of positions, computed once for all layers.
"""
