//! JSON objects in which no key stands twice.

use std::{collections::HashSet, fmt, marker::PhantomData};

use serde::{
    Deserialize,
    de::{Deserializer, Error, MapAccess, Visitor},
};

/// The members of a JSON object in file order, no key twice: of two, one reader takes the first and another the last.
pub struct Object<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Object<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members(PhantomData))
    }
}

struct Members<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for Members<V> {
    type Value = Object<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut members, mut seen) = (Vec::new(), HashSet::new());
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            if !seen.insert(key.clone()) {
                return Err(A::Error::custom(format_args!("key {key:?} stands there twice")));
            }
            members.push((key, value));
        }
        Ok(Object(members))
    }
}
