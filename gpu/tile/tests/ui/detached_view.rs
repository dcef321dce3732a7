use oxtile_tile::prelude::*;

fn alias<'a>(output: &mut DeviceViewMut<'a, f32>) -> DeviceView<'a, f32> {
    output.as_view()
}

fn main() {}
