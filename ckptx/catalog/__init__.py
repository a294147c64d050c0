"""The contents of a checkpoint as data: dtypes, regions, entries, the catalog, the manifest.

Terms for parts of a tensor, here and in the other packages:

    region    rectangular part of a tensor, as offsets and sizes                             `Region`
    chunk     a region and the position of its bytes in a file; the chunks tile the tensor   `Chunk`
    block     a region that one rank of a mesh stores, with or without a file yet            `Block`
    replica   chunk or block with the region of an earlier one; not among those that tile the tensor
    shard     the slice of a tensor on one rank: one block, or several for a fused tensor

and for parts of a torch archive, which is a zip file:

    member    one file in the archive, such as `data/0`
    storage   a member with the bytes of a torch storage
    record    position, length and CRC-32 of a storage                                       `Record`
    payload   the elements of the tensor in the archive: all bytes of a storage, or a view   `Payload`
    frame     the bytes of the archive before and after the elements                         `ArchiveFrame`
"""
