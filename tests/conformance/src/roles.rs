//! Roles of warpgroups, and tiles handed out to blocks that stay.

use oxtile_tile::prelude::*;
use oxtile_tile::scheduler::PersistentTiles;
use oxtile_tile::warpgroup::{self, Role, Roles};

type Team = Roles<2, 40, 232>;

/// Blocks of [`team_roles`](fn@team_roles).
pub const ROLE_BLOCKS: u32 = 3;
/// Rows and columns of tiles that they share.
pub const ROLE_TILES: [u32; 2] = [5, 3];
/// Words of output: one a tile of each consumer, then one a thread.
pub const ROLES_OUTPUT: u32 = 2 * ROLE_TILES[0] * ROLE_TILES[1] + ROLE_BLOCKS * Team::THREADS;

/// Each consumer's leader marks the tiles that its block gets; each thread says what it is.
#[kernel(threads = Team::THREADS, grid = grid, requires = sm_90a)]
pub fn team_roles(output: GlobalMut<u32>) {
    let mut tiles = PersistentTiles::<2>::new(ROLE_TILES[0], ROLE_TILES[1]);
    let all = ROLE_TILES[0] * ROLE_TILES[1];
    let word = match Team::role() {
        Role::Producer(role) => 2 - u32::from(role.begin()),
        Role::Consumer(role) => {
            let consumer = role.begin();
            let mut order = 0;
            while let Some([row, column]) = tiles.next_tile() {
                if warpgroup::is_leader() {
                    output.store(u64::from(consumer * all + row * ROLE_TILES[1] + column), block::index()[0] << 8 | order);
                }
                order += 1;
                warpgroup::sync(1 + consumer);
            }
            16 + consumer + 256 * warpgroup::index()
        }
    };
    output.store(u64::from(2 * all + block::index()[0] * Team::THREADS + thread::index()), word);
}

fn grid(args: &TeamRolesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", u64::from(ROLES_OUTPUT), args.output.len())?;
    Ok(Grid::x(ROLE_BLOCKS))
}
