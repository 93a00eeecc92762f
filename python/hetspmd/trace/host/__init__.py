"""What Python does beside the graph of a step: what forward reads, writes and draws that is no tensor op.

facts      what a graph says of it: reads, writes, numbers that are inputs
plain      values as text: which are equal, and which can be put on another rank's model
raw        what containers hold, whatever their classes do when asked
steps      which item of a container is meant
exact_types comparisons with just the class of tensors
places     where a value lies: on a module, an object, a function's globals or its closure, in torch's own
process    settings of torch that forward must not change
snapshot   what was there before, and putting it back
foreign    whose code a module is
names      what a function's code names
classes    the classes that a model's code meets
discovery  all functions and classes of a model, before anything runs
content    what an object holds that nothing follows
kinds      functions and what they are bound to, iterators
code_digest what a function's code does, as text
code       which globals and closure variables a function reads
members    attributes of objects, slots among them
in_place   objects whose content is changed in place
settings   torch's own settings on which a graph depends
reads      telling of attributes that are read
followed   an object whose attributes are recorded
outside    modules that the step reads and the model does not have
untrained  leaves of autograd outside of the model, for which a plan has no gradient
cached_results what cached functions give, so that it stays as on one device
recorder   which attributes are read while a step is traced
entropy    random numbers that Python code draws
seeds      torch's random state, which forward must not set
clocks     clocks, and the system's random bytes, that it asks for
bound      names that held a clock before
imported   what a module that forward imports first has taken of these
stand_ins  what lies there while forward runs
changes    what forward leaves behind, as writes or as a refusal
watch      all of these around a trace
"""
