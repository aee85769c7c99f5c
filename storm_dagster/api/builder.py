"""Topologies, as classes or by a builder, and the checks of every topology.

The attributes of a topology class are its components.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from storm_dagster.api.specs import Inputs, Outputs, Spec, _json_map
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.names import check_component_id
from storm_dagster.model.topology import ComponentSpec, TopologySpec, check_inputs


class TopologyBuilder:
    """Collection of spouts and bolts by id.

    >>> builder = TopologyBuilder("wc")
    >>> builder.set_spout("words", WordSpout, par=2)
    >>> builder.set_bolt("count", CountBolt, inputs={"words": Grouping.fields("word")})
    """

    def __init__(self, name: str = "", config: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.config: dict[str, Any] = dict(config or {})
        self._specs: dict[str, Spec] = {}

    def set_spout(
        self,
        component_id: str,
        component: Any,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
    ) -> Spec:
        """Add a spout: a class, a :class:`Spec`, or ``"module:Class"``.

        The returned spec can be used as an input.
        """
        return self._add(
            "spout", component_id, component, par=par, config=config, args=args, outputs=outputs
        )

    def set_bolt(
        self,
        component_id: str,
        component: Any,
        inputs: Inputs = None,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
    ) -> Spec:
        """Add a bolt: a class, a :class:`Spec`, or ``"module:Class"``.

        Inputs are component ids, specs or their streams, as in ``Component.spec``.
        """
        return self._add(
            "bolt",
            component_id,
            component,
            inputs,
            par=par,
            config=config,
            args=args,
            outputs=outputs,
        )

    def _add(
        self, kind: str, component_id: str, component: Any, inputs: Inputs = None, **options: Any
    ) -> Spec:
        """Add a component, and return its spec, which gets the id as its name.

        Of a spec that is passed only the inputs are replaced; the other options are ignored.
        :class:`InvalidTopology` for an id in use, and a component of another kind.
        """
        if component_id in self._specs:
            raise InvalidTopology(
                f"component id {component_id!r} is used twice: rename one of the two"
            )
        if isinstance(component, Spec):
            spec = component
            if inputs is not None:
                spec.inputs = inputs
        elif isinstance(component, str):
            if options["par"] is None:
                options["par"] = 1
            spec = Spec(kind=kind, code=component, inputs=inputs, **options)
        elif isinstance(component, type) and hasattr(component, "spec"):
            component_class: Any = component
            spec = component_class.spec(inputs=inputs, **options)
        else:
            raise InvalidTopology(
                f"component {component_id!r} must be a Spout or Bolt class, a spec, "
                f"or 'module:Class', got {component!r:.60}"
            )
        if spec.kind != kind:
            raise InvalidTopology(
                f"component {component_id!r} is a {spec.kind}: add it with set_{spec.kind}"
            )
        spec.name = component_id
        self._specs[component_id] = spec
        return spec

    def build(self) -> TopologySpec:
        """The serializable topology; :class:`InvalidTopology` if it is not valid."""
        return build_spec(self._specs, name=self.name, config=self.config, title="the topology")

    to_spec = build


class Topology:
    """Base of topologies::

        class WordCount(Topology):
            words = WordSpout.spec()
            count = CountBolt.spec(inputs={words: Grouping.fields("word")}, par=2)

    The name of an attribute is the component's id unless its spec has another name. ``config`` is
    the topology's own conf, which a submission's conf overrides. Components of base classes come
    first.
    """

    config: ClassVar[Mapping[str, Any] | None] = None
    name: ClassVar[Any] = None
    """Name of the topology; by default that of the file or module."""

    @classmethod
    def specs(cls) -> dict[str, Spec]:
        """The component specs by id, in declared order."""
        attributes: dict[str, Spec] = {}
        for base in reversed(cls.__mro__):
            for attribute, value in vars(base).items():
                if isinstance(value, Spec):
                    attributes[attribute] = value
                else:
                    # A subclass removes a component by another value, such as None.
                    attributes.pop(attribute, None)
        specs: dict[str, Spec] = {}
        for attribute, spec in attributes.items():
            component = spec.name or attribute
            if component in specs:
                raise InvalidTopology(
                    f"topology {cls.__name__} has two components with the id {component!r} "
                    f"(one is {attribute!r}): rename one of them"
                )
            specs[component] = spec
        return specs

    @classmethod
    def to_spec(cls) -> TopologySpec:
        """The serializable topology; :class:`InvalidTopology` if it is not valid."""
        name = cls.name if isinstance(cls.name, str) else ""
        return build_spec(
            cls.specs(), name=name, config=cls.config or {}, title=f"topology {cls.__name__}"
        )


def build_spec(
    specs: Mapping[str, Spec], *, name: str, config: Mapping[str, Any], title: str
) -> TopologySpec:
    """Build and check the topology of these components; a spec without a name gets its id.

    ``title`` names the topology in errors. Checks ids, at least one spout, that inputs, their
    streams and their fields exist, that the code can be imported, and that arguments are JSON
    values. Nimbus makes all other checks, for every client.
    """
    # ``id()`` of a spec -> its component id: inputs refer to specs.
    names: dict[int, str] = {}
    for component_id, spec in specs.items():
        check_component_id(component_id)
        if id(spec) in names:
            raise InvalidTopology(
                f"{title}: {names[id(spec)]!r} and {component_id!r} are one and the same spec: "
                "make one for each"
            )
        names[id(spec)] = component_id
        spec.name = spec.name or component_id
    if not any(spec.kind == "spout" for spec in specs.values()):
        raise InvalidTopology(f"{title} has no spout: add one, only spouts produce tuples")
    spouts: dict[str, ComponentSpec] = {}
    bolts: dict[str, ComponentSpec] = {}
    checkpoint_owners: dict[Any, str] = {}
    for component_id, spec in specs.items():
        if getattr(spec._code, "_owns_checkpoint", False):
            _check_checkpoint(component_id, spec._args.get("checkpoint"), checkpoint_owners)
        if spec.kind == "spout":
            spouts[component_id] = spec.to_component(names)
        else:
            bolts[component_id] = spec.to_component(names)
    topology = TopologySpec(
        name=name, spouts=spouts, bolts=bolts, conf=_json_map(config, f"{title}: config")
    )
    for component_id, part in bolts.items():
        if not part.inputs:
            raise InvalidTopology(f"bolt {component_id!r} has no inputs: give it at least one")
        streams = check_inputs(topology, component_id)
        check = getattr(specs[component_id]._code, "check_inputs", None)
        if check is not None:
            check(f"bolt {component_id!r}", streams)
    return topology


def _check_checkpoint(component_id: str, folder: Any, owners: dict[Any, str]) -> None:
    """Register the checkpoint folder of a spout in ``owners``.

    ``owners`` maps folders to component ids. Raises :class:`InvalidTopology` if another spout has
    the same folder.
    """
    if not folder:
        return
    owner = owners.setdefault(folder, component_id)
    if owner != component_id:
        raise InvalidTopology(
            f"spouts {owner!r} and {component_id!r} have one checkpoint, {folder}: "
            "give each its own"
        )
