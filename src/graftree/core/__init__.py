"""Objects and their functional form, from values up to models.

    paths  filters  ownership             keys of leaves; which leaves to select; which
    fingerprints  hashable_mappings       trace may write; has anything changed since;
    patterns  pickling  walks  exporting  equal static values; what is in a pickle;
       |                                  which parts of a model to select; the walk;
       |                                  our objects in the files of ``jax.export``;
  hooks|                                  what files need from those above them
       v
    text/          how objects print
    variables/     the box: a value, its metadata, the trace that owns it
    objects/       attributes as data or static; Pytree
    states/        State and its kin: leaves by path
    graph/         object <-> (GraphDef, State): split, merge, update, clone, walks
    modules/       Module, List, Dict; what a model records; views; refs
    rng/           streams of random keys, split and reseeded

A folder imports those above it in this list.
"""
