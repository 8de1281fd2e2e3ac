// Names of layers with type and shape, in the order of the model.

import { layerTitle, tail } from "./format.js";

// Type and shape are left out where the label would be longer than `most` characters.
export function layerLabel(run, layer, most = Infinity) {
  const kind = run.layer_kinds && Object.hasOwn(run.layer_kinds, layer ?? "") ? ` (${run.layer_kinds[layer]})` : "";
  const label = `${layerTitle(layer)}${kind}`;
  return label.length <= most ? label : tail(layerTitle(layer), most);
}

// Items that have a layer: those of the model itself, then the layers in the order of the model, then layers that it does not list.
export function inModelOrder(run, items) {
  const places = new Map(Object.keys(run.layer_kinds ?? {}).map((layer, place) => [layer, place]));
  const placeIn = ({ layer }) => (layer === null || layer === "" ? -1 : places.get(layer) ?? places.size);
  return [...items].sort((a, b) => placeIn(a) - placeIn(b));
}
