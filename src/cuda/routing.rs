//! `Routing` of kernels/routing.cuh as bytes: which experts each row uses, the list of all of them,
//! and where each row's own list has them.

use super::layout::{MAX_EXPERTS, MAX_ROWS, MAX_USED, ROUTING_BYTES};

/// The experts of a row with their weights, in rising order.
pub type Route = Vec<(usize, f32)>;

/// Where its fields begin; the count of the list comes first.
const LIST: usize = 4;
const PLACE: usize = LIST + MAX_EXPERTS * 4;
const USES: usize = PLACE + MAX_ROWS * MAX_EXPERTS;
const USED: usize = USES + MAX_ROWS * MAX_USED * 8;

/// What `route` leaves for these rows; zero where it leaves nothing.
pub fn encode_routes(routes: &[Route], experts: usize) -> Vec<u8> {
    let mut bytes = vec![0; ROUTING_BYTES];
    let mut put = |at: usize, field: [u8; 4]| bytes[at..at + 4].copy_from_slice(&field);
    let mut list: Vec<usize> = routes.iter().flatten().map(|(expert, _)| *expert).collect();
    list.sort_unstable();
    list.dedup();
    put(0, (list.len() as i32).to_ne_bytes());
    let mut used = [0u32; MAX_EXPERTS / 32];
    for (index, expert) in list.iter().enumerate() {
        put(LIST + index * 4, (*expert as i32).to_ne_bytes());
        used[expert / 32] |= 1 << (expert % 32);
    }
    for (group, bits) in used.iter().enumerate() {
        put(USED + group * 4, bits.to_ne_bytes());
    }
    for (row, route) in routes.iter().enumerate() {
        for (place, (expert, weight)) in route.iter().enumerate() {
            let at = USES + (row * MAX_USED + place) * 8;
            put(at, (*expert as i32).to_ne_bytes());
            put(at + 4, weight.to_ne_bytes());
        }
    }
    for (row, route) in routes.iter().enumerate() {
        let places = &mut bytes[PLACE + row * MAX_EXPERTS..][..experts];
        places.fill(-1i8 as u8);
        for (place, (expert, _)) in route.iter().enumerate() {
            places[*expert] = place as u8;
        }
    }
    bytes
}

/// The part of `bytes` that says something about `rows` rows; zero elsewhere.
pub fn said(bytes: &[u8], rows: usize, experts: usize, used: usize) -> Vec<u8> {
    let count = (int(bytes, 0).max(0) as usize).min(MAX_EXPERTS);
    let mut said = vec![0; ROUTING_BYTES];
    let mut keep = |at: usize, len: usize| said[at..at + len].copy_from_slice(&bytes[at..at + len]);
    keep(0, LIST + count * 4);
    for row in 0..rows {
        keep(PLACE + row * MAX_EXPERTS, experts);
        keep(USES + row * MAX_USED * 8, used * 8);
    }
    keep(USED, experts.div_ceil(32) * 4);
    said
}

/// The routes of `rows` rows that use `used` experts each.
///
/// # Errors
/// A few words on what is not as `route` has to leave it.
pub fn decode_routes(
    bytes: &[u8],
    rows: usize,
    experts: usize,
    used: usize,
) -> Result<Vec<Route>, String> {
    let mut routes = Vec::with_capacity(rows);
    for row in 0..rows {
        let mut route: Route = Vec::with_capacity(used);
        for place in 0..used {
            let at = USES + (row * MAX_USED + place) * 8;
            let expert = int(bytes, at);
            let last = route.last().map_or(-1, |(expert, _)| *expert as i32);
            if expert <= last || expert >= experts as i32 {
                return Err(format!("row {row} has expert {expert} behind {last}"));
            }
            route.push((expert as usize, f32::from_bits(int(bytes, at + 4) as u32)));
        }
        routes.push(route);
    }
    let as_listed = encode_routes(&routes, experts);
    if said(bytes, rows, experts, used) != said(&as_listed, rows, experts, used) {
        return Err("its list of experts or their places are not those of the rows".into());
    }
    Ok(routes)
}

fn int(bytes: &[u8], at: usize) -> i32 {
    i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes() -> Vec<Route> {
        vec![vec![(1, 0.5), (35, 0.25)], vec![(0, 1.0), (35, 2.0)]]
    }

    #[test]
    fn routes_come_back() {
        let mut bytes = encode_routes(&routes(), 40);
        // What is behind the rows, the experts and the list does not count.
        bytes[PLACE + 40] = 7;
        bytes[PLACE + 2 * MAX_EXPERTS] = 7;
        bytes[USES + 2 * 8] = 7;
        bytes[LIST + 3 * 4] = 7;
        assert_eq!(decode_routes(&bytes, 2, 40, 2), Ok(routes()));
        assert_eq!(int(&bytes, 0), 3);
        assert_eq!([0, 1, 2].map(|i| int(&bytes, LIST + i * 4)), [0, 1, 35]);
    }

    #[test]
    fn wrong_lists_and_places_are_found() {
        for at in [0, LIST, PLACE, PLACE + MAX_EXPERTS + 35, USED] {
            let mut bytes = encode_routes(&routes(), 40);
            bytes[at] ^= 1;
            assert!(decode_routes(&bytes, 2, 40, 2).is_err(), "byte {at}");
        }
        let mut bytes = encode_routes(&routes(), 40);
        bytes[USES] = 36;
        let fault = decode_routes(&bytes, 2, 40, 2).expect_err("falling experts");
        assert_eq!(fault, "row 0 has expert 35 behind 36");
        assert!(decode_routes(&vec![0x7F; ROUTING_BYTES], 1, 40, 2).is_err());
    }
}
